use super::*;

fn conv() -> TimeConv {
    TimeConv { shift: 10, mult: 512, zero: 0 }
}

fn folder(name: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("ptwprobe-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir(&path).expect("a temporary folder");
    path
}

#[test]
fn the_header_tells_only_what_is_flushed() {
    let folder = folder("flushed");
    let path = folder.join("perf.data");
    let mut writer = Writer::create(&path, conv(), WriterInfo::default()).expect("created");
    let told = |path: &Path| {
        let bytes = std::fs::read(path).expect("readable");
        let size = u64::from_le_bytes(bytes[48..56].try_into().expect("8 bytes"));
        let data = u64::from_le_bytes(bytes[40..48].try_into().expect("8 bytes"));
        (data + size, bytes.len() as u64)
    };
    let empty = told(&path);
    writer.comm(1, 1, b"program", 5, true).expect("buffered");
    assert_eq!(told(&path), empty);
    writer.flush().expect("written");
    let (end, len) = told(&path);
    assert_eq!((end, len), (writer.len(), writer.len()));
    assert!(Writer::create(&path, conv(), WriterInfo::default()).is_err(), "never over an old file");
    std::fs::remove_dir_all(folder).expect("removed");
}

#[test]
fn a_write_that_stops_halfway_keeps_whole_records() {
    let folder = folder("halfway");
    let mut writer = Writer::create(&folder.join("perf.data"), conv(), WriterInfo::default()).expect("created");
    writer.finished_round().expect("buffered");
    writer.auxtrace(1, 1, &[0; 100], 1).expect("buffered");
    writer.finished_round().expect("buffered");
    let len = writer.buffer.len();
    assert_eq!(len, 8 + 48 + 100 + 8);
    for (done, whole) in [(0, 0), (7, 0), (8, 8), (60, 8), (155, 8), (156, 156), (163, 156), (164, 164)] {
        assert_eq!(whole_records(&writer.buffer, done), whole);
    }
    std::fs::remove_dir_all(folder).expect("removed");
}

#[test]
fn a_full_disk_is_told_and_the_file_stays_readable() {
    let folder = folder("full");
    let path = folder.join("perf.data");
    let mut writer = Writer::create(&path, conv(), WriterInfo::default()).expect("created");
    writer.comm(1, 1, b"program", 5, false).expect("buffered");
    writer.flush().expect("written");
    let len = writer.len();
    // A file opened for reading only refuses writes, as a full disk does.
    writer.file = File::open(&path).expect("readable");
    writer.comm(1, 1, b"later", 6, false).expect("buffered");
    assert!(writer.flush().is_err());
    assert!(writer.comm(1, 1, b"later", 6, false).is_err());
    assert_eq!(writer.len(), len);
    std::fs::remove_dir_all(folder).expect("removed");
}
