//! What a span's histograms are kept apart by: [`GroupBy`], [`GroupKey`].

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::driver::Reading;
use crate::error::Error;
use crate::histogram::Histogram;

/// What a span has histograms of its own for, counted apart in the kernel; see
/// [`Span::grouped_by`](crate::Span::grouped_by).
///
/// All but the CPU are looked at where the span starts. What has none (a packet without a device, a socket that isn't
/// bound), and what finds no room among the groups, is counted in [`Groups::rest`](crate::Groups::rest).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum GroupBy {
    /// The CPU on which it ends. Costs nothing, and has room for every CPU.
    Cpu,
    /// The network interface that the packet is at (`skb->dev`), or, without a packet, that the socket is bound to. It
    /// tells something only where the packet is at a device. Interfaces of different network namespaces that have the
    /// same index are one group.
    Interface,
    /// The transport protocol: of the packet's outermost IP header, or, without a packet, of the socket. Later
    /// fragments, and packets whose headers aren't known yet or aren't there as a whole, are in the rest.
    Protocol,
    /// The port on this side: of the packet's socket, or, without a packet, of the socket. Of a packet without a socket
    /// it is the port that the packet is sent to, which is no local port if the packet is forwarded or goes out. Where
    /// that can't be read, as for [`Protocol`](Self::Protocol), it is in the rest.
    LocalPort,
}

/// One group of a span; see [`GroupBy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum GroupKey {
    /// The CPU's number.
    Cpu(u32),
    /// The interface's index (`ip link` shows it), in its network namespace.
    Interface(u32),
    /// The protocol's number (`IPPROTO_...`): 6 is TCP, 17 is UDP.
    Protocol(u8),
    /// The port.
    LocalPort(u16),
}

/// A span's histograms, kept apart; see [`LatencyProbe::groups`](crate::LatencyProbe::groups).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Groups {
    /// Each group's, in the keys' order.
    pub groups: BTreeMap<GroupKey, Histogram>,
    /// Of all that is in no group, and of groups for which there was no room.
    pub rest: Histogram,
}

impl Groups {
    pub(crate) fn new(by: GroupBy, reading: &Reading) -> Self {
        let mut groups = Self { groups: BTreeMap::new(), rest: Histogram::new() };
        for (group, histogram) in &reading.groups {
            match group {
                Some(number) if !histogram.is_empty() => {
                    groups.groups.insert(by.key(*number), histogram.clone());
                }
                Some(_) => {}
                None => groups.rest = histogram.clone(),
            }
        }
        groups
    }

    /// All of them together: the span's [`histogram`](crate::LatencyProbe::histogram) at that moment.
    pub fn total(&self) -> Histogram {
        let mut total = self.rest.clone();
        self.groups.values().for_each(|histogram| total.merge(histogram));
        total
    }
}

impl GroupBy {
    /// What the kernel has counted under this number.
    pub(crate) fn key(self, number: u64) -> GroupKey {
        match self {
            Self::Cpu => GroupKey::Cpu(number as u32),
            Self::Interface => GroupKey::Interface(number as u32),
            Self::Protocol => GroupKey::Protocol(number as u8),
            Self::LocalPort => GroupKey::LocalPort(number as u16),
        }
    }
}

const NAMES: [(GroupBy, &str); 4] = [
    (GroupBy::Cpu, "cpu"),
    (GroupBy::Interface, "interface"),
    (GroupBy::Protocol, "protocol"),
    (GroupBy::LocalPort, "local-port"),
];

/// `cpu`, `interface`, `protocol` or `local-port`.
impl fmt::Display for GroupBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(NAMES.iter().find(|(by, _)| by == self).map_or("", |(_, name)| name))
    }
}

impl FromStr for GroupBy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let by = NAMES.iter().find(|(_, name)| *name == text).map(|(by, _)| *by);
        by.ok_or_else(|| {
            let names = NAMES.map(|(_, name)| name).join(", ");
            Error::config("grouped_by", format!("nothing can be grouped by `{text}`: {names} are possible"))
        })
    }
}

/// `cpu 3`, `interface 2`, `protocol 17`, `local-port 53`.
impl fmt::Display for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(cpu) => write!(f, "cpu {cpu}"),
            Self::Interface(index) => write!(f, "interface {index}"),
            Self::Protocol(number) => write!(f, "protocol {number}"),
            Self::LocalPort(port) => write!(f, "local-port {port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// They are written as they are read.
    #[test]
    fn names() {
        for (by, name) in NAMES {
            assert_eq!((by.to_string(), name.parse::<GroupBy>().unwrap()), (name.to_owned(), by));
        }
        let error = "queue".parse::<GroupBy>().unwrap_err().to_string();
        assert_eq!(error, "nothing can be grouped by `queue`: cpu, interface, protocol, local-port are possible");
        assert_eq!(GroupBy::LocalPort.key(53).to_string(), "local-port 53");
    }
}
