//! The structures of the Arrow C data interface and C stream interface, as
//! <https://arrow.apache.org/docs/format/CDataInterface.html> and `CStreamInterface.html` lay them out.
//!
//! Whoever holds a structure calls its `release` once, or moves it elsewhere and clears that of the old place. Memory
//! that a structure points to belongs to its `private_data`.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr;

use super::column::{Buffer, Column, Field};
use super::Batches;

/// The name of a capsule that holds a stream.
pub const STREAM_NAME: &CStr = c"arrow_array_stream";

const NULLABLE: i64 = 2;

#[repr(C)]
struct ArrowSchema {
    format: *const c_char,
    name: *const c_char,
    metadata: *const c_char,
    flags: i64,
    n_children: i64,
    children: *mut *mut ArrowSchema,
    dictionary: *mut ArrowSchema,
    release: Option<unsafe extern "C" fn(*mut ArrowSchema)>,
    private_data: *mut c_void,
}

#[repr(C)]
struct ArrowArray {
    length: i64,
    null_count: i64,
    offset: i64,
    n_buffers: i64,
    n_children: i64,
    buffers: *mut *const c_void,
    children: *mut *mut ArrowArray,
    dictionary: *mut ArrowArray,
    release: Option<unsafe extern "C" fn(*mut ArrowArray)>,
    private_data: *mut c_void,
}

/// A table on its way to whoever reads it; dropping it releases what nobody took.
#[repr(C)]
pub struct ArrayStream {
    get_schema: Option<unsafe extern "C" fn(*mut ArrayStream, *mut ArrowSchema) -> c_int>,
    get_next: Option<unsafe extern "C" fn(*mut ArrayStream, *mut ArrowArray) -> c_int>,
    get_last_error: Option<unsafe extern "C" fn(*mut ArrayStream) -> *const c_char>,
    release: Option<unsafe extern "C" fn(*mut ArrayStream)>,
    private_data: *mut c_void,
}

// SAFETY: all that it points to is its own, and may be used from any thread (`Batches` is `Send`).
unsafe impl Send for ArrayStream {}

/// What a stream's `private_data` points to.
struct StreamData {
    source: Box<dyn Batches>,
    error: CString,
}

impl ArrayStream {
    #[must_use]
    pub fn new(source: Box<dyn Batches>) -> Self {
        let data = Box::new(StreamData { source, error: CString::default() });
        Self {
            get_schema: Some(get_schema),
            get_next: Some(get_next),
            get_last_error: Some(get_last_error),
            release: Some(release_stream),
            private_data: Box::into_raw(data).cast(),
        }
    }
}

impl Drop for ArrayStream {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: it was not released, and not moved away: then `release` would be empty.
            unsafe { release(self) };
        }
    }
}

/// # Safety
/// `stream` is one of ours, and not released.
unsafe extern "C" fn get_schema(stream: *mut ArrayStream, out: *mut ArrowSchema) -> c_int {
    // SAFETY: `private_data` is what `ArrayStream::new` put there.
    let data = unsafe { &*(*stream).private_data.cast::<StreamData>() };
    let fields = data.source.fields();
    let schema = ArrowSchema::new("+s", "", 0, fields.iter().map(ArrowSchema::of).collect(), None);
    // SAFETY: the caller gives room for one.
    unsafe { out.write(schema) };
    0
}

/// # Safety
/// As of `get_schema`.
unsafe extern "C" fn get_next(stream: *mut ArrayStream, out: *mut ArrowArray) -> c_int {
    // SAFETY: as in `get_schema`; a stream is used by one thread at a time.
    let data = unsafe { &mut *(*stream).private_data.cast::<StreamData>() };
    let (array, result) = match data.source.next_columns() {
        Ok(Some(columns)) => {
            let len = columns.first().map_or(0, |column| column.len);
            let children = columns.into_iter().map(ArrowArray::of).collect();
            (ArrowArray::new(len, 0, vec![None], children, None), 0)
        }
        Ok(None) => (ArrowArray::ended(), 0),
        Err(message) => {
            data.error = c_string(&message);
            (ArrowArray::ended(), libc::EIO)
        }
    };
    // SAFETY: the caller gives room for one.
    unsafe { out.write(array) };
    result
}

/// # Safety
/// As of `get_schema`.
unsafe extern "C" fn get_last_error(stream: *mut ArrayStream) -> *const c_char {
    // SAFETY: as in `get_schema`. The text stays until the next call.
    unsafe { (*(*stream).private_data.cast::<StreamData>()).error.as_ptr() }
}

/// # Safety
/// As of `get_schema`.
unsafe extern "C" fn release_stream(stream: *mut ArrayStream) {
    // SAFETY: as in `get_schema`; nobody uses it any more.
    unsafe {
        drop(Box::from_raw((*stream).private_data.cast::<StreamData>()));
        (*stream).private_data = ptr::null_mut();
        (*stream).release = None;
    }
}

/// Without what a C string cannot hold.
fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// Structures of their own at the addresses in `pointers`, which is what C sees of them.
struct Owned<T> {
    pointers: Vec<*mut T>,
}

impl<T> Owned<T> {
    fn new(list: impl IntoIterator<Item = T>) -> Self {
        Self { pointers: list.into_iter().map(|one| Box::into_raw(Box::new(one))).collect() }
    }

    fn first(&self) -> *mut T {
        self.pointers.first().copied().unwrap_or(ptr::null_mut())
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        for pointer in self.pointers.drain(..) {
            // SAFETY: `new` made it, and nobody else frees it. Its own drop releases it, if nobody took it.
            drop(unsafe { Box::from_raw(pointer) });
        }
    }
}

struct SchemaData {
    format: CString,
    name: CString,
    children: Owned<ArrowSchema>,
    dictionary: Owned<ArrowSchema>,
}

impl ArrowSchema {
    fn of(field: &Field) -> Self {
        let flags = if field.nullable { NULLABLE } else { 0 };
        let item = field.item.map(|format| Self::new(format, "item", 0, Vec::new(), None));
        let dictionary = field.dictionary.then(|| Self::new("u", "", 0, Vec::new(), None));
        Self::new(field.format, &field.name, flags, item.into_iter().collect(), dictionary)
    }

    fn new(format: &str, name: &str, flags: i64, children: Vec<Self>, dictionary: Option<Self>) -> Self {
        let mut data = Box::new(SchemaData {
            format: c_string(format),
            name: c_string(name),
            children: Owned::new(children),
            dictionary: Owned::new(dictionary),
        });
        Self {
            format: data.format.as_ptr(),
            name: data.name.as_ptr(),
            metadata: ptr::null(),
            flags,
            n_children: data.children.pointers.len() as i64,
            children: data.children.pointers.as_mut_ptr(),
            dictionary: data.dictionary.first(),
            release: Some(release_schema),
            private_data: Box::into_raw(data).cast(),
        }
    }
}

impl Drop for ArrowSchema {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: it is ours, and was neither released nor moved away.
            unsafe { release(self) };
        }
    }
}

/// # Safety
/// `schema` is one of ours, and not released.
unsafe extern "C" fn release_schema(schema: *mut ArrowSchema) {
    // SAFETY: `private_data` is what `ArrowSchema::new` put there.
    unsafe {
        drop(Box::from_raw((*schema).private_data.cast::<SchemaData>()));
        (*schema).private_data = ptr::null_mut();
        (*schema).release = None;
    }
}

struct ArrayData {
    /// What `pointers` point into.
    _buffers: Vec<Option<Box<dyn Buffer>>>,
    pointers: Vec<*const c_void>,
    children: Owned<ArrowArray>,
    dictionary: Owned<ArrowArray>,
}

impl ArrowArray {
    fn of(column: Column) -> Self {
        let Column { len, nulls, buffers, child, dictionary } = column;
        let children = child.into_iter().map(|child| Self::of(*child)).collect();
        Self::new(len, nulls, buffers, children, dictionary.map(|column| Self::of(*column)))
    }

    fn new(
        len: usize,
        nulls: usize,
        buffers: Vec<Option<Box<dyn Buffer>>>,
        children: Vec<Self>,
        dictionary: Option<Self>,
    ) -> Self {
        let pointers = buffers.iter().map(|b| b.as_ref().map_or(ptr::null(), |b| b.pointer())).collect();
        let mut data = Box::new(ArrayData {
            _buffers: buffers,
            pointers,
            children: Owned::new(children),
            dictionary: Owned::new(dictionary),
        });
        Self {
            length: len as i64,
            null_count: nulls as i64,
            offset: 0,
            n_buffers: data.pointers.len() as i64,
            n_children: data.children.pointers.len() as i64,
            buffers: data.pointers.as_mut_ptr(),
            children: data.children.pointers.as_mut_ptr(),
            dictionary: data.dictionary.first(),
            release: Some(release_array),
            private_data: Box::into_raw(data).cast(),
        }
    }

    /// A released one: the end of a stream.
    fn ended() -> Self {
        Self {
            length: 0,
            null_count: 0,
            offset: 0,
            n_buffers: 0,
            n_children: 0,
            buffers: ptr::null_mut(),
            children: ptr::null_mut(),
            dictionary: ptr::null_mut(),
            release: None,
            private_data: ptr::null_mut(),
        }
    }
}

impl Drop for ArrowArray {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: it is ours, and was neither released nor moved away.
            unsafe { release(self) };
        }
    }
}

/// # Safety
/// `array` is one of ours, and not released.
unsafe extern "C" fn release_array(array: *mut ArrowArray) {
    // SAFETY: `private_data` is what `ArrowArray::new` put there.
    unsafe {
        drop(Box::from_raw((*array).private_data.cast::<ArrayData>()));
        (*array).private_data = ptr::null_mut();
        (*array).release = None;
    }
}
