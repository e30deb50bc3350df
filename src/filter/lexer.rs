//! The words of a filter's text.

use super::parse::fail;
use crate::error::Error;

/// The longest text that is read, in bytes.
const LONGEST_TEXT: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Token<'a> {
    /// Its first byte in the text.
    pub(super) start: usize,
    /// As it was written.
    pub(super) text: &'a str,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Open,
    Close,
    And,
    Or,
    Not,
    Word,
    /// What stood within the quotes.
    Quoted(Vec<u8>),
}

/// Takes a text apart.
pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, Error> {
    if text.len() > LONGEST_TEXT {
        let reason = format!("it has {} bytes, and no more than {LONGEST_TEXT} are read", text.len());
        return Err(fail(text, text.floor(LONGEST_TEXT), "", reason));
    }
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let start = text.len() - rest.len();
        let (kind, len) = match first {
            '(' => (Kind::Open, 1),
            ')' => (Kind::Close, 1),
            '!' => (Kind::Not, 1),
            '&' | '|' => operator(rest).ok_or_else(|| {
                let reason = format!("a single `{first}` means nothing; did you mean `{first}{first}`?");
                fail(text, start, &rest[..1], reason)
            })?,
            '"' => quoted(rest).map_err(|(at, reason)| fail(text, start + at, rest, reason))?,
            _ => word(rest),
        };
        let (token, after) = rest.split_at(len);
        tokens.push(Token { start, text: token, kind });
        rest = after.trim_start();
    }
    Ok(tokens)
}

trait Floor {
    fn floor(&self, at: usize) -> usize;
}

impl Floor for str {
    /// The last boundary of a character up to here.
    fn floor(&self, at: usize) -> usize {
        (0..=at).rev().find(|&at| self.is_char_boundary(at)).unwrap_or(0)
    }
}

fn operator(rest: &str) -> Option<(Kind, usize)> {
    let kind = if rest.starts_with("&&") {
        Kind::And
    } else if rest.starts_with("||") {
        Kind::Or
    } else {
        return None;
    };
    Some((kind, 2))
}

fn word(rest: &str) -> (Kind, usize) {
    let ends = |c: char| c.is_whitespace() || "()!&|\"".contains(c);
    let len = rest.find(ends).unwrap_or(rest.len());
    let kind = match &rest[..len] {
        "and" => Kind::And,
        "or" => Kind::Or,
        "not" => Kind::Not,
        _ => Kind::Word,
    };
    (kind, len)
}

/// From one double quote to the next; or where in the rest it goes wrong, and why.
fn quoted(rest: &str) -> Result<(Kind, usize), (usize, String)> {
    let mut bytes = Vec::new();
    let mut chars = rest.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((Kind::Quoted(bytes), at + 1)),
            '\\' => {
                let wrong = || (at, "in quotes `\\` stands before `\"`, `\\` or `xNN`, with two digits".to_owned());
                match chars.next().ok_or_else(wrong)?.1 {
                    c @ ('"' | '\\') => bytes.push(c as u8),
                    'x' => {
                        let mut digit = || chars.next().and_then(|(_, c)| c.to_digit(16));
                        let (high, low) = digit().zip(digit()).ok_or_else(wrong)?;
                        bytes.push((high << 4 | low) as u8);
                    }
                    _ => return Err(wrong()),
                }
            }
            c => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    Err((0, "the quotes aren't closed".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<Kind> {
        tokens(text).unwrap().into_iter().map(|token| token.kind).collect()
    }

    /// Operators need no blanks around them, where they are no words.
    #[test]
    fn takes_apart() {
        use Kind::{And, Close, Not, Open, Or, Word};
        assert_eq!(kinds("(a&&!b)||not c"), [Open, Word, And, Not, Word, Close, Or, Not, Word]);
        assert_eq!(kinds(" and\tor\nnotes "), [And, Or, Word]);
        assert_eq!(kinds("\u{a0}\u{2003}"), []);
        let tokens = tokens(r#"é comm"x""#).unwrap();
        assert_eq!((tokens[1].start, tokens[1].text, tokens[2].text), (3, "comm", "\"x\""));
    }

    /// Quotes keep every byte.
    #[test]
    fn quotes() {
        assert_eq!(kinds(r#""a \"\\\x00\xfF(é""#), [Kind::Quoted(b"a \"\\\x00\xff(\xc3\xa9".to_vec())]);
        assert_eq!(kinds(r#""and""""#), [Kind::Quoted(b"and".to_vec()), Kind::Quoted(vec![])]);
        for text in [r#"""#, r#""a"#, r#""\""#, r#""\n""#, r#""\x1""#, r#""\x"#, r#""\"#, r#""\x1é""#, "&", "a | b"] {
            assert!(tokens(text).is_err(), "{text}");
        }
    }

    /// Absurd texts aren't looked at.
    #[test]
    fn length() {
        assert_eq!(kinds(&" ".repeat(LONGEST_TEXT)), []);
        let error = tokens(&"é".repeat(LONGEST_TEXT)).unwrap_err().to_string();
        assert!(error.ends_with("at character 2049: it has 8192 bytes, and no more than 4096 are read"), "{error}");
    }
}
