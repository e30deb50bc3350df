//! One thing that a filter asks of a packet: [`Primitive`].

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::pcap::Pcap;
use super::value::{Ports, Prefix, Protocol};

/// Which of a packet's two addresses or ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Source,
    Destination,
    Either,
}

/// Which of a connection's two ports, whatever the packet's direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Local,
    Remote,
}

/// Where an interface counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// The device that the packet is at.
    Now,
    /// The device that it was received on.
    Received,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Interface {
    Name(String),
    Index(u32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Netns {
    Path(PathBuf),
    OfPid(u32),
    Inode(u32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Primitive {
    Protocol(Protocol),
    Ipv4,
    Ipv6,
    Address(End, Prefix),
    Port(End, Ports),
    SidePort(Side, Ports),
    Interface(At, Interface),
    Netns(Netns),
    Pid(u32),
    Tid(u32),
    Comm(Vec<u8>),
    Cgroup(PathBuf),
    Mark {
        value: u32,
        mask: u32,
    },
    /// In bytes, both included.
    Length {
        low: u32,
        high: u32,
    },
    Pcap(Pcap),
}

/// The most bytes that the kernel keeps of a thread's name (`TASK_COMM_LEN`, without the NUL).
pub(super) const COMM_BYTES: usize = 15;
/// The most bytes of an interface's name (`IFNAMSIZ`, without the NUL).
const INTERFACE_BYTES: usize = 15;

impl Primitive {
    /// What is wrong with it, as far as can be said without this host.
    pub(super) fn complaint(&self) -> Option<String> {
        match self {
            Self::Port(_, ports) | Self::SidePort(_, ports) if ports.low > ports.high => {
                Some(format!("there are no ports from {} to {}", ports.low, ports.high))
            }
            Self::Length { low, high } if low > high => Some(format!("there are no lengths from {low} to {high}")),
            Self::Mark { value, mask } if value & !mask != 0 => Some(format!(
                "no mark is {value:#x} where only {mask:#x} of it counts; did you mean {:#x}/{mask:#x}?",
                value & mask
            )),
            Self::Comm(name) => comm_complaint(name),
            Self::Interface(_, Interface::Name(name)) => {
                let bad = name.is_empty()
                    || name.len() > INTERFACE_BYTES
                    || name.contains(|c: char| c == '/' || c == '\0' || c.is_whitespace());
                bad.then(|| format!("{name:?} is not an interface's name, which has up to {INTERFACE_BYTES} bytes"))
            }
            Self::Interface(_, Interface::Index(0)) => Some("no interface has the index 0".to_owned()),
            Self::Netns(Netns::Path(path)) if path.as_os_str().is_empty() => {
                Some("the path of the network namespace is empty".to_owned())
            }
            Self::Cgroup(path) if path.as_os_str().is_empty() => Some("the path of the cgroup is empty".to_owned()),
            _ => None,
        }
    }
}

fn comm_complaint(name: &[u8]) -> Option<String> {
    let shown = name.escape_ascii();
    if name.contains(&0) {
        return Some(format!("a thread's name has no NUL: `{shown}`"));
    }
    let kept = name.get(..COMM_BYTES).filter(|kept| kept.len() < name.len())?;
    let kept = kept.escape_ascii();
    Some(format!("`{shown}`: the kernel keeps {COMM_BYTES} bytes of a thread's name, which are `{kept}`"))
}

/// As [`Filter`](super::Filter)'s `FromStr` reads it.
impl fmt::Display for Primitive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Protocol(protocol) => match protocol.name() {
                Some(name) => f.write_str(name),
                None => write!(f, "proto {protocol}"),
            },
            Self::Ipv4 => f.write_str("ip"),
            Self::Ipv6 => f.write_str("ip6"),
            Self::Address(end, prefix) if prefix.is_host() => write!(f, "{end}host {prefix}"),
            Self::Address(end, prefix) => write!(f, "{end}net {prefix}"),
            Self::Port(end, ports) => write!(f, "{end}{} {ports}", port_word(ports)),
            Self::SidePort(Side::Local, ports) => write!(f, "local {} {ports}", port_word(ports)),
            Self::SidePort(Side::Remote, ports) => write!(f, "remote {} {ports}", port_word(ports)),
            Self::Interface(at, interface) => {
                f.write_str(if *at == At::Now { "dev " } else { "iif " })?;
                match interface {
                    Interface::Index(index) => write!(f, "{index}"),
                    // In quotes it is a name, whatever it looks like.
                    Interface::Name(name) if name.bytes().all(|byte| byte.is_ascii_digit()) => write!(f, "\"{name}\""),
                    Interface::Name(name) => write_word(f, name.as_bytes()),
                }
            }
            Self::Netns(Netns::Inode(inode)) => write!(f, "netns {inode}"),
            Self::Netns(Netns::OfPid(pid)) => write!(f, "netns pid {pid}"),
            Self::Netns(Netns::Path(path)) => {
                let absolute = path.is_absolute();
                f.write_str("netns ")?;
                if absolute { write_word(f, bytes(path.as_os_str())) } else { write_quoted(f, bytes(path.as_os_str())) }
            }
            Self::Pid(pid) => write!(f, "pid {pid}"),
            Self::Tid(tid) => write!(f, "tid {tid}"),
            Self::Comm(name) => {
                f.write_str("comm ")?;
                write_word(f, name)
            }
            Self::Cgroup(path) => {
                f.write_str("cgroup ")?;
                write_word(f, bytes(path.as_os_str()))
            }
            Self::Mark { value, mask: u32::MAX } => write!(f, "mark {value:#x}"),
            Self::Mark { value, mask } => write!(f, "mark {value:#x}/{mask:#x}"),
            Self::Length { low, high } if low == high => write!(f, "len {low}"),
            Self::Length { low, high: u32::MAX } => write!(f, "greater {low}"),
            Self::Length { low: 0, high } => write!(f, "less {high}"),
            Self::Length { low, high } => write!(f, "len {low}-{high}"),
            Self::Pcap(pcap) => {
                f.write_str("pcap ")?;
                write_quoted(f, pcap.expression.as_bytes())
            }
        }
    }
}

/// With a space behind it where it is written at all.
impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "src ",
            Self::Destination => "dst ",
            Self::Either => "",
        })
    }
}

fn port_word(ports: &Ports) -> &'static str {
    if ports.low == ports.high { "port" } else { "portrange" }
}

fn bytes(text: &OsStr) -> &[u8] {
    text.as_bytes()
}

/// A word that could be taken for something else goes into quotes.
fn write_word(f: &mut fmt::Formatter<'_>, word: &[u8]) -> fmt::Result {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_./:@%+,=-".contains(byte);
    match std::str::from_utf8(word) {
        Ok("and" | "or" | "not" | "") | Err(_) => write_quoted(f, word),
        Ok(text) if text.bytes().all(|byte| plain(&byte)) => f.write_str(text),
        Ok(_) => write_quoted(f, word),
    }
}

fn write_quoted(f: &mut fmt::Formatter<'_>, word: &[u8]) -> fmt::Result {
    f.write_str("\"")?;
    for chunk in word.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                // A terminal would obey it.
                c if c.is_control() => write_bytes(f, c.encode_utf8(&mut [0; 4]).as_bytes())?,
                c => write!(f, "{c}")?,
            }
        }
        write_bytes(f, chunk.invalid())?;
    }
    f.write_str("\"")
}

fn write_bytes(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "\\x{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comm(name: &[u8]) -> String {
        Primitive::Comm(name.to_owned()).to_string()
    }

    /// Odd names are quoted, and only these.
    #[test]
    fn quoting() {
        assert_eq!(comm(b"curl"), "comm curl");
        assert_eq!(comm(b"kworker/0:1-mm"), "comm kworker/0:1-mm");
        assert_eq!(comm(b"tcp"), "comm tcp");
        assert_eq!(comm(b""), r#"comm """#);
        assert_eq!(comm(b"and"), r#"comm "and""#);
        assert_eq!(comm(b"(sd-pam)"), r#"comm "(sd-pam)""#);
        assert_eq!(comm(b"a b\"\\\n\x7f"), r#"comm "a b\"\\\x0a\x7f""#);
        assert_eq!(comm("\u{e9}\u{9b}".as_bytes()), "comm \"\u{e9}\\xc2\\x9b\"");
        assert_eq!(comm(b"\xff\xc3a"), r#"comm "\xff\xc3a""#);
        let interface = |name: &str| Primitive::Interface(At::Now, Interface::Name(name.to_owned())).to_string();
        assert_eq!((interface("eth0.5"), interface("7")), ("dev eth0.5".to_owned(), r#"dev "7""#.to_owned()));
        let netns = |path: &str| Primitive::Netns(Netns::Path(path.into())).to_string();
        assert_eq!((netns("/run/a"), netns("pid")), ("netns /run/a".to_owned(), r#"netns "pid""#.to_owned()));
    }

    /// What can never be true is said before anything is attached.
    #[test]
    fn complaints() {
        let port = |ports: std::ops::RangeInclusive<u16>| Primitive::Port(End::Either, ports.into()).complaint();
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = port(9..=5);
        assert_eq!(reversed.unwrap(), "there are no ports from 9 to 5");
        assert_eq!(port(5..=5), None);
        let mark = |value, mask| Primitive::Mark { value, mask }.complaint();
        assert_eq!(mark(0x103, 0xff).unwrap(), "no mark is 0x103 where only 0xff of it counts; did you mean 0x3/0xff?");
        assert_eq!(mark(0, 0), None);
        let comm = |name: &[u8]| Primitive::Comm(name.to_owned()).complaint();
        assert_eq!(comm(b"123456789012345"), None);
        assert_eq!(
            comm(b"1234567890123456").unwrap(),
            "`1234567890123456`: the kernel keeps 15 bytes of a thread's name, which are `123456789012345`"
        );
        assert_eq!(comm(b"a\0").unwrap(), "a thread's name has no NUL: `a\\x00`");
        assert!(Primitive::Length { low: 2, high: 1 }.complaint().is_some());
        assert!(Primitive::Cgroup("".into()).complaint().is_some());
        assert!(Primitive::Netns(Netns::Path("".into())).complaint().is_some());
        for name in ["", "a/b", "a b", "a\0"] {
            assert!(Primitive::Interface(At::Now, Interface::Name(name.to_owned())).complaint().is_some(), "{name:?}");
        }
        assert!(Primitive::Interface(At::Received, Interface::Index(0)).complaint().is_some());
    }
}
