//! Reading the values of a filter's text.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use super::Filter;
use super::lexer::{Kind, Token};
use super::primitive::{At, End, Interface, Netns, Primitive, Side};
use super::value::{Ports, Prefix, Protocol, number};
use crate::error::Error;

/// How much of a word an error shows.
const SHOWN_CHARS: usize = 40;

/// What a value is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Protocol,
    Address(Ends),
    Port(Ends),
    SidePort(Side),
    Interface(At),
    Netns,
    NetnsOfPid,
    Pid,
    Tid,
    Comm,
    Cgroup,
    Mark,
    Length,
    AtMost,
    AtLeast,
    Pcap,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    One(End),
    Both,
}

/// What is missing, if it is.
impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Protocol => "a protocol",
            Self::Address(_) => "an address",
            Self::Port(_) | Self::SidePort(_) => "a port",
            Self::Interface(_) => "an interface",
            Self::Netns => "a network namespace",
            Self::NetnsOfPid | Self::Pid => "a pid",
            Self::Tid => "a tid",
            Self::Comm => "a thread's name",
            Self::Cgroup => "a cgroup",
            Self::Mark => "a mark",
            Self::Length | Self::AtMost | Self::AtLeast => "a length",
            Self::Pcap => "a pcap expression",
        })
    }
}

/// The filter for one value; or what is wrong with it.
pub(super) fn read(what: What, token: &Token<'_>) -> Result<Filter, String> {
    let (bytes, quoted) = match &token.kind {
        Kind::Quoted(bytes) => (bytes.clone(), true),
        _ => (token.text.as_bytes().to_vec(), false),
    };
    let path = || PathBuf::from(OsString::from_vec(bytes.clone()));
    // Two of the values may be other than text.
    let lossy = String::from_utf8_lossy(&bytes).into_owned();
    let text = lossy.as_str();
    let is_number = !quoted && text.bytes().all(|byte| byte.is_ascii_digit());
    Ok(match what {
        What::Protocol => Filter::protocol(text.parse::<Protocol>().map_err(|error| error.to_string())?),
        What::Address(ends) => {
            let prefix: Prefix = text.parse().map_err(|error: Error| error.to_string())?;
            at_ends(ends, |end| Primitive::Address(end, prefix))
        }
        What::Port(ends) => {
            let ports = ports(text)?;
            at_ends(ends, |end| Primitive::Port(end, ports))
        }
        What::SidePort(side) => Filter::is(Primitive::SidePort(side, ports(text)?)),
        What::Interface(at) if is_number => {
            Filter::is(Primitive::Interface(at, Interface::Index(small(text, "an interface")?)))
        }
        What::Interface(at) => {
            let name = String::from_utf8(bytes).map_err(|_| format!("`{}` is not UTF-8", shown(text)))?;
            Filter::is(Primitive::Interface(at, Interface::Name(name)))
        }
        What::Netns if is_number => Filter::netns_inode(small(text, "a network namespace's inode")?),
        What::Netns if quoted || text.starts_with('/') => Filter::is(Primitive::Netns(Netns::Path(path()))),
        What::Netns => {
            let shown = shown(text);
            return Err(format!(
                "`{shown}` is no network namespace: a path such as /run/netns/{shown}, an inode, or `pid` and a pid are"
            ));
        }
        What::NetnsOfPid => Filter::netns_of_pid(small(text, "a pid")?),
        What::Pid => Filter::pid(small(text, "a pid")?),
        What::Tid => Filter::tid(small(text, "a tid")?),
        What::Comm => Filter::comm(bytes),
        What::Cgroup => Filter::cgroup(path()),
        What::Mark => match text.split_once('/') {
            Some((value, mask)) => Filter::mark(small(value, "a mark")?, small(mask, "a mark's mask")?),
            None => Filter::mark(small(text, "a mark")?, u32::MAX),
        },
        What::Length => match text.split_once('-') {
            Some((low, high)) => {
                let (low, high) = (small(low, "a length")?, small(high, "a length")?);
                Filter::is(Primitive::Length { low, high })
            }
            None => {
                let length = small(text, "a length")?;
                Filter::length(length..=length)
            }
        },
        What::AtMost => Filter::length(..=small(text, "a length")?),
        What::AtLeast => Filter::length(small(text, "a length")?..),
        What::Pcap => {
            let expression = String::from_utf8(bytes).map_err(|_| format!("`{}` is not UTF-8", shown(text)))?;
            Filter::of_pcap(&expression).map_err(|error| error.to_string())?
        }
    })
}

fn at_ends(ends: Ends, primitive: impl Fn(End) -> Primitive) -> Filter {
    match ends {
        Ends::One(end) => Filter::is(primitive(end)),
        Ends::Both => Filter::is(primitive(End::Source)).and(Filter::is(primitive(End::Destination))),
    }
}

fn ports(text: &str) -> Result<Ports, String> {
    let port = |port: &str| number(port).and_then(|port| u16::try_from(port).ok());
    let ports = match text.split_once('-') {
        Some((low, high)) => port(low).zip(port(high)).map(|(low, high)| Ports { low, high }),
        None => port(text).map(Ports::from),
    };
    ports.ok_or_else(|| format!("`{}` is no port: 0 to 65535 are, and ranges such as 8000-8100", shown(text)))
}

/// A number of 32 bits.
fn small(text: &str, what: &str) -> Result<u32, String> {
    let value = number(text).and_then(|value| u32::try_from(value).ok());
    value.ok_or_else(|| format!("`{}` is not {what}: 0 to {} are", shown(text), u32::MAX))
}

/// A word as an error shows it.
pub(super) fn shown(word: &str) -> String {
    let mut chars = word.chars();
    let mut shown: String = chars.by_ref().take(SHOWN_CHARS).flat_map(char::escape_debug).collect();
    if chars.next().is_some() {
        shown.push_str("...");
    }
    shown
}
