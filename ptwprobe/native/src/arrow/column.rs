//! Columns, and how they are filled.

use std::ffi::c_void;

/// The name and type of a column; `format` as the Arrow C data interface writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: String,
    pub format: &'static str,
    pub nullable: bool,
    /// Of a list, its items; of numbers that stand for text, nothing.
    pub item: Option<&'static str>,
    /// The numbers stand for texts.
    pub dictionary: bool,
}

impl Field {
    #[must_use]
    pub fn new(name: &str, format: &'static str, nullable: bool) -> Self {
        Self { name: name.to_owned(), format, nullable, item: None, dictionary: false }
    }

    /// Text by number, of 8 bits.
    #[must_use]
    pub fn dictionary(name: &str) -> Self {
        Self { dictionary: true, ..Self::new(name, "C", false) }
    }

    /// Lists of 64-bit words.
    #[must_use]
    pub fn words(name: &str) -> Self {
        Self { item: Some("L"), ..Self::new(name, "+l", false) }
    }
}

/// Memory of a column, which stays where it is.
pub trait Buffer: Send {
    fn pointer(&self) -> *const c_void;
}

impl<T: Send> Buffer for Vec<T> {
    fn pointer(&self) -> *const c_void {
        self.as_ptr().cast()
    }
}

/// A column that is full. Its buffers begin with that of the valid rows, which may not be there.
pub struct Column {
    pub(super) len: usize,
    pub(super) nulls: usize,
    pub(super) buffers: Vec<Option<Box<dyn Buffer>>>,
    pub(super) child: Option<Box<Column>>,
    pub(super) dictionary: Option<Box<Column>>,
}

/// Which rows are valid, a bit each, from the lowest of the first byte on.
#[derive(Debug, Default)]
struct Valid {
    bits: Vec<u8>,
    len: usize,
    nulls: usize,
}

impl Valid {
    fn push(&mut self, valid: bool) {
        if self.bits.len() * 8 == self.len {
            self.bits.push(0);
        }
        if let Some(last) = self.bits.last_mut() {
            *last |= u8::from(valid) << (self.len % 8);
        }
        self.len += 1;
        self.nulls += usize::from(!valid);
    }

    fn column(self, buffers: Vec<Box<dyn Buffer>>) -> Column {
        let (len, nulls) = (self.len, self.nulls);
        let bits = (nulls > 0).then(|| Box::new(self.bits) as Box<dyn Buffer>);
        let buffers = std::iter::once(bits).chain(buffers.into_iter().map(Some)).collect();
        Column { len, nulls, buffers, child: None, dictionary: None }
    }
}

/// Integers of type `T`.
#[derive(Debug)]
pub struct Ints<T> {
    values: Vec<T>,
    valid: Valid,
}

impl<T> Default for Ints<T> {
    fn default() -> Self {
        Self { values: Vec::new(), valid: Valid::default() }
    }
}

impl<T: Copy + Default + Send + 'static> Ints<T> {
    pub fn push(&mut self, value: Option<T>) {
        self.values.push(value.unwrap_or_default());
        self.valid.push(value.is_some());
    }

    #[must_use]
    pub fn take(&mut self) -> Column {
        let Self { values, valid } = std::mem::take(self);
        valid.column(vec![Box::new(values)])
    }

    /// Numbers that stand for `texts`.
    #[must_use]
    pub fn take_dictionary<'a>(&mut self, texts: impl IntoIterator<Item = &'a str>) -> Column {
        let mut dictionary = Texts::default();
        texts.into_iter().for_each(|text| dictionary.push(text));
        Column { dictionary: Some(Box::new(dictionary.take())), ..self.take() }
    }
}

/// Where each row ends; the first begins at 0.
#[derive(Debug)]
struct Ends(Vec<i32>);

impl Default for Ends {
    fn default() -> Self {
        Self(vec![0])
    }
}

impl Ends {
    fn push(&mut self, end: usize) {
        // A batch is far smaller.
        self.0.push(i32::try_from(end).unwrap_or(i32::MAX));
    }
}

/// Text.
#[derive(Debug, Default)]
pub struct Texts {
    bytes: Vec<u8>,
    ends: Ends,
    valid: Valid,
}

impl Texts {
    pub fn push(&mut self, text: &str) {
        self.bytes.extend_from_slice(text.as_bytes());
        self.ends.push(self.bytes.len());
        self.valid.push(true);
    }

    #[must_use]
    pub fn take(&mut self) -> Column {
        let Self { bytes, ends, valid } = std::mem::take(self);
        valid.column(vec![Box::new(ends.0), Box::new(bytes)])
    }
}

/// Lists of words.
#[derive(Debug, Default)]
pub struct Words {
    words: Ints<u64>,
    ends: Ends,
    valid: Valid,
}

impl Words {
    pub fn push(&mut self, words: &[u64]) {
        words.iter().for_each(|&word| self.words.push(Some(word)));
        self.ends.push(self.words.values.len());
        self.valid.push(true);
    }

    #[must_use]
    pub fn take(&mut self) -> Column {
        let Self { mut words, ends, valid } = std::mem::take(self);
        Column { child: Some(Box::new(words.take())), ..valid.column(vec![Box::new(ends.0)]) }
    }
}
