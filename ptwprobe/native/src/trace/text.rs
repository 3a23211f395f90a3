//! Numbers and names as text, fast and safe for terminals and parsers.

/// Decimal.
pub fn push_u64(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut len = 0;
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
        len += 1;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(digits.get(digits.len() - len..).unwrap_or_default());
}

/// Decimal with sign.
pub fn push_i128(out: &mut Vec<u8>, value: i128) {
    if value < 0 {
        out.push(b'-');
    }
    push_u64(out, u64::try_from(value.unsigned_abs()).unwrap_or(u64::MAX));
}

/// Hexadecimal without a prefix.
pub fn push_hex(out: &mut Vec<u8>, value: u64) {
    let digits = (64 - value.leading_zeros()).div_ceil(4).max(1);
    for at in (0..digits).rev() {
        let digit = (value >> (4 * at) & 0xf) as u8;
        out.push(if digit < 10 { b'0' + digit } else { b'a' + digit - 10 });
    }
}

/// `text` right-aligned in `width` columns.
pub fn push_right(out: &mut Vec<u8>, width: usize, fill: u8, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    write(out);
    let missing = width.saturating_sub(out.len() - start);
    if missing > 0 {
        out.resize(out.len() + missing, fill);
        if let Some(field) = out.get_mut(start..) {
            field.rotate_right(missing);
        }
    }
}

/// Seconds with nine decimals.
pub fn push_seconds(out: &mut Vec<u8>, ns: u64) {
    push_u64(out, ns / 1_000_000_000);
    out.push(b'.');
    push_right(out, 9, b'0', |out| push_u64(out, ns % 1_000_000_000));
}

/// A name of any bytes as printable text: what is not UTF-8, controls the terminal or turns the direction of text
/// becomes `\xNN` or `\u{N}`.
pub fn push_name(out: &mut Vec<u8>, name: &[u8]) {
    if name.iter().all(|b| (0x20..0x7f).contains(b)) {
        return out.extend_from_slice(name);
    }
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\0'..='\x1f' | '\x7f' => push_escaped_byte(out, c as u8),
                _ if c.is_control() || turns_text(c) => {
                    out.extend_from_slice(b"\\u{");
                    push_hex(out, u64::from(c));
                    out.push(b'}');
                }
                _ => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        for &byte in chunk.invalid() {
            push_escaped_byte(out, byte);
        }
    }
}

/// [`push_name`] as a string.
#[must_use]
pub fn printable(name: &[u8]) -> String {
    let mut out = Vec::with_capacity(name.len());
    push_name(&mut out, name);
    String::from_utf8_lossy(&out).into_owned()
}

fn push_escaped_byte(out: &mut Vec<u8>, byte: u8) {
    out.extend_from_slice(b"\\x");
    push_right(out, 2, b'0', |out| push_hex(out, u64::from(byte)));
}

/// Line separators and marks of direction, which move what stands beside them.
fn turns_text(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// A JSON string of what [`push_name`] makes of `name`.
pub fn push_json_name(out: &mut Vec<u8>, name: &[u8]) {
    let start = out.len() + 1;
    out.push(b'"');
    push_name(out, name);
    if out.get(start..).is_some_and(|text| text.iter().any(|b| matches!(b, b'"' | b'\\'))) {
        let text = out.split_off(start);
        for byte in text {
            if matches!(byte, b'"' | b'\\') {
                out.push(b'\\');
            }
            out.push(byte);
        }
    }
    out.push(b'"');
}

/// A field of a CSV line, in quotes where it needs them.
pub fn push_csv_name(out: &mut Vec<u8>, name: &[u8]) {
    let start = out.len();
    push_name(out, name);
    if out.get(start..).is_some_and(|text| text.iter().any(|b| matches!(b, b'"' | b',' | b'\n' | b'\r'))) {
        let text = out.split_off(start);
        out.push(b'"');
        for byte in text {
            if byte == b'"' {
                out.push(b'"');
            }
            out.push(byte);
        }
        out.push(b'"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).expect("UTF-8")
    }

    #[test]
    fn hostile_names_are_escaped() {
        assert_eq!(text(|out| push_name(out, b"a b\x1b[31m\n\xff\xc3\xa9")), "a b\\x1b[31m\\x0a\\xff\u{e9}");
        assert_eq!(text(|out| push_name(out, "\u{202e}x\u{85}".as_bytes())), "\\u{202e}x\\u{85}");
        assert_eq!(text(|out| push_json_name(out, b"a\"\\\n")), r#""a\"\\\\x0a""#);
        assert_eq!(text(|out| push_csv_name(out, b"a,\"b\"")), r#""a,""b""""#);
    }

    proptest! {
        #[test]
        fn numbers_are_written_as_rust_does(value: u64, signed: i64) {
            prop_assert_eq!(text(|out| push_u64(out, value)), value.to_string());
            prop_assert_eq!(text(|out| push_hex(out, value)), format!("{value:x}"));
            prop_assert_eq!(text(|out| push_i128(out, i128::from(signed))), signed.to_string());
            let seconds = format!("{}.{:09}", value / 1_000_000_000, value % 1_000_000_000);
            prop_assert_eq!(text(|out| push_seconds(out, value)), seconds);
        }

        #[test]
        fn names_are_always_one_line_of_text(name: Vec<u8>) {
            prop_assert!(!text(|out| push_name(out, &name)).chars().any(char::is_control));
        }
    }
}
