//! Which packets to measure: [`Filter`].

mod compile;
mod host;
mod lexer;
mod parse;
mod pcap;
mod primitive;
#[cfg(test)]
mod random;
mod read;
#[cfg(test)]
mod reference;
mod value;

use std::fmt;
use std::ops::{BitAnd, BitOr, Bound, Not, RangeBounds};
use std::path::PathBuf;

pub(crate) use compile::{Field, Test};
pub(crate) use pcap::Instruction;
#[cfg(any(test, fuzzing))]
pub use pcap::fuzz_instructions;
pub use value::{Ports, Prefix, Protocol};

use pcap::Pcap;
use primitive::{At, End, Interface, Netns, Primitive, Side};

/// Which packets to measure: plain data, from these functions or from a text.
///
/// ```
/// use dwell::{Filter, Prefix, Protocol};
///
/// let dns = Filter::protocol(Protocol::UDP) & Filter::destination_port(53);
/// let private: Prefix = "10.0.0.0/8".parse()?;
/// let filter = dns & !Filter::source(private);
/// assert_eq!(filter, "udp and dst port 53 and not src net 10.0.0.0/8".parse()?);
/// assert_eq!(filter, "udp dst port 53 and not src 10.0.0.0/8".parse()?);
/// # Ok::<(), dwell::Error>(())
/// ```
///
/// # In words
///
/// The words are those of tcpdump (`pcap-filter(7)`), and some more:
///
/// | | |
/// |---|---|
/// | `tcp`, `udp`, `icmp`, `icmp6`, `sctp`, ... or `proto 47` | the transport protocol |
/// | `ip`, `ip6` | the IP version |
/// | `host 10.0.0.1`, `net 10.0.0.0/8`, `src host ::1`, `dst 10.0.0.1` | an address, or a prefix |
/// | `port 80`, `portrange 8000-8100`, `src port 53`, `dst port 53` | a port, of those in the packet |
/// | `local port 53`, `remote port 53` | a port of this host, or of its peer |
/// | `dev eth0`, `dev 2` (or `ifname`); `iif eth0` | the interface that the packet is at; that it was received on |
/// | `netns /run/netns/blue`, `netns pid 123`, `netns 4026531840` | the network namespace |
/// | `pid 1`, `tid 1`, `comm curl` | the process or thread that runs |
/// | `cgroup /sys/fs/cgroup/system.slice`, `cgroup /system.slice` | the socket's cgroup, or one above it |
/// | `mark 0x1`, `mark 0x1/0xff` | the packet's mark |
/// | `len 100`, `len 100-200`, `less 200`, `greater 100` | the packet's length in bytes, bounds included |
/// | `pcap "tcp[tcpflags] & tcp-syn != 0"` | what libpcap makes of it; with the feature `pcap` |
///
/// `src or dst`, which is the default, and `src and dst` stand where `src` may. A protocol may stand before what is asked
/// of its packets: `tcp port 80`, `ip6 net fe80::/10`. Numbers are decimal, or hexadecimal after `0x`; names of hosts,
/// ports and networks aren't looked up.
///
/// `not` (`!`), `and` (`&&`), `or` (`||`) and parentheses put these together. As in tcpdump `not` binds tightest, and
/// **`and` and `or` bind alike, from the left**: `udp or tcp and port 53` is `(udp or tcp) and port 53`. And as there, a
/// bare value repeats the words before the last one: `tcp dst port 80 or 443` is `tcp dst port 80 or tcp dst port 443`,
/// and so does `tcp dst port (80 or 443)`; but `not port 80 and 443` is `(not port 80) and port 443`.
///
/// Names and paths with blanks, parentheses or `!&|"`, and those that could be taken for something else, go into double
/// quotes; there `\"` and `\\` stand for themselves and `\xNN` for any byte.
///
/// What is written is read as an equal filter, up to the size that is read: 4,096 bytes, 64 pairs of parentheses within
/// each other.
///
/// # What is matched
///
/// It is decided where the span starts, by what is known there: from the packet's headers where it has them, else from its
/// socket, or the function's own; where a function has no packet, from the socket alone.
///
/// | packet | what counts |
/// |---|---|
/// | VLAN, tag taken off by the interface, or in the packet, or two of them | the IP header behind the tags |
/// | IPv6 with extension headers | what follows them, up to six |
/// | the first fragment of a packet | its ports, as in any other |
/// | a later fragment | addresses and protocol. **It has no ports: it matches no `port`, and each `not port`** |
/// | ICMP, and what else has no ports | likewise |
/// | ARP, and what else isn't IP | none of `ip`, `ip6`, `host`, `net`, `port` and protocols; but each `not` of them |
/// | a super-packet, put together by GRO or not yet cut by GSO | its headers, once for all of it; its length is that of all |
/// | data outside the linear part (`sendfile`, `MSG_ZEROCOPY`) | its headers, which are in it |
/// | IPIP, VXLAN | the outer headers, or the inner ones if [`inner_headers`](crate::LatencyProbeBuilder::inner_headers) asks for it |
/// | headers not written yet, on the way out | the socket: its own port, and of a connected one its peer |
/// | `::ffff:10.0.0.1` as a socket's address | 10.0.0.1, as which it is also written in a filter |
///
/// What can't be told, as the peer of a socket that isn't connected, makes a test neither true nor false, and `not` of it as
/// well. Where that decides, the packet is left out and counted as [`unparsed`](crate::SpanLedger::unparsed).
///
/// `local port` and `remote port` are told by the socket. Of a packet that was received and has no socket yet, the
/// destination's is taken for the local one, also where it will be forwarded; and before the kernel has noted by which
/// interface it came in (`__netif_receive_skb_core` does), neither that nor `iif` can be told. `pid`, `tid` and `comm` are of the thread that
/// runs: in a softirq that is whatever was interrupted.
///
/// # Kernel and privileges
///
/// None, until a probe is attached with it. Then interfaces, namespaces and cgroups are looked up by what this process
/// sees.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a filter chooses packets once a probe is attached with it"]
pub struct Filter {
    /// In postfix order, so that nothing recurses: what a program puts together may be nested without bound. It has at
    /// least one part. No `Not` follows another, and no operand of a `Join` is a `Join` of the same kind, so that filters
    /// that differ in parentheses only are equal.
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Is(Primitive),
    /// Of the operand before it.
    Not,
    /// Of so many operands before it, at least two.
    Join(Join, usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Join {
    All,
    Any,
}

impl Filter {
    /// Packets of this transport protocol.
    ///
    /// ```
    /// use dwell::{Filter, Protocol};
    ///
    /// assert_eq!(Filter::protocol(Protocol::TCP).to_string(), "tcp");
    /// assert_eq!(Filter::protocol(200).to_string(), "proto 200");
    /// ```
    pub fn protocol(protocol: impl Into<Protocol>) -> Self {
        Self::is(Primitive::Protocol(protocol.into()))
    }

    /// IPv4 packets.
    pub fn ipv4() -> Self {
        Self::is(Primitive::Ipv4)
    }

    /// IPv6 packets.
    pub fn ipv6() -> Self {
        Self::is(Primitive::Ipv6)
    }

    /// Packets from or to this address, or one with this prefix.
    pub fn host(address: impl Into<Prefix>) -> Self {
        Self::is(Primitive::Address(End::Either, address.into()))
    }

    /// Packets from this address, or one with this prefix.
    pub fn source(address: impl Into<Prefix>) -> Self {
        Self::is(Primitive::Address(End::Source, address.into()))
    }

    /// Packets to this address, or one with this prefix.
    pub fn destination(address: impl Into<Prefix>) -> Self {
        Self::is(Primitive::Address(End::Destination, address.into()))
    }

    /// Packets from or to this port, or one in this range.
    ///
    /// ```
    /// use dwell::Filter;
    ///
    /// let web = Filter::port(80) | Filter::port(8000..=8100);
    /// assert_eq!(web.to_string(), "port 80 or portrange 8000-8100");
    /// ```
    pub fn port(ports: impl Into<Ports>) -> Self {
        Self::is(Primitive::Port(End::Either, ports.into()))
    }

    /// Packets from this port, or one in this range.
    pub fn source_port(ports: impl Into<Ports>) -> Self {
        Self::is(Primitive::Port(End::Source, ports.into()))
    }

    /// Packets to this port, or one in this range.
    pub fn destination_port(ports: impl Into<Ports>) -> Self {
        Self::is(Primitive::Port(End::Destination, ports.into()))
    }

    /// Packets whose port on this host is this one, or in this range: where they go to if they come in, where they come
    /// from if they go out.
    pub fn local_port(ports: impl Into<Ports>) -> Self {
        Self::is(Primitive::SidePort(Side::Local, ports.into()))
    }

    /// Packets whose port at the peer is this one, or in this range.
    pub fn remote_port(ports: impl Into<Ports>) -> Self {
        Self::is(Primitive::SidePort(Side::Remote, ports.into()))
    }

    /// Packets at the interface of this name (`skb->dev`), or alternative name of up to 15 bytes. It is looked up in the
    /// network namespace of this process; in another one, another interface may have the same index.
    pub fn interface(name: impl Into<String>) -> Self {
        Self::is(Primitive::Interface(At::Now, Interface::Name(name.into())))
    }

    /// Packets at the interface of this index (`ip link` shows it), in whichever network namespace.
    pub fn interface_index(index: u32) -> Self {
        Self::is(Primitive::Interface(At::Now, Interface::Index(index)))
    }

    /// Packets that were received on the interface of this name (`skb->skb_iif`); looked up as for
    /// [`interface`](Self::interface).
    pub fn received_on(name: impl Into<String>) -> Self {
        Self::is(Primitive::Interface(At::Received, Interface::Name(name.into())))
    }

    /// Packets that were received on the interface of this index, in whichever network namespace.
    pub fn received_on_index(index: u32) -> Self {
        Self::is(Primitive::Interface(At::Received, Interface::Index(index)))
    }

    /// Packets in this network namespace, by a file that stands for it, such as `/run/netns/blue` or
    /// `/proc/123/ns/net`.
    pub fn netns(path: impl Into<PathBuf>) -> Self {
        Self::is(Primitive::Netns(Netns::Path(path.into())))
    }

    /// Packets in the network namespace that this process is in when the probe is attached. The pid is that which this
    /// process's `/proc` shows.
    pub fn netns_of_pid(pid: u32) -> Self {
        Self::is(Primitive::Netns(Netns::OfPid(pid)))
    }

    /// Packets in the network namespace with this inode (`lsns`, `readlink /proc/self/ns/net`).
    pub fn netns_inode(inode: u32) -> Self {
        Self::is(Primitive::Netns(Netns::Inode(inode)))
    }

    /// While this process runs: what user space calls the pid, in the initial pid namespace.
    ///
    /// It is the process on the CPU, as in [`LatencyEvent::pid`](crate::LatencyEvent::pid): in a softirq whichever was
    /// interrupted, not the one that the packet belongs to. The same holds for [`tid`](Self::tid),
    /// [`comm`](Self::comm) and [`cgroup`](Self::cgroup).
    ///
    /// # Errors
    ///
    /// `attach` fails in a pid namespace other than the initial one, where the kernel's numbers aren't known.
    pub fn pid(pid: u32) -> Self {
        Self::is(Primitive::Pid(pid))
    }

    /// While this thread runs, by its id in the initial pid namespace.
    ///
    /// # Errors
    ///
    /// As of [`pid`](Self::pid).
    pub fn tid(tid: u32) -> Self {
        Self::is(Primitive::Tid(tid))
    }

    /// While a thread of exactly this name runs (`/proc/PID/comm`). Names may be empty, and have any bytes but NUL.
    ///
    /// # Errors
    ///
    /// `attach` fails for names of more than 15 bytes, which the kernel cuts off, and for those with a NUL.
    pub fn comm(name: impl AsRef<[u8]>) -> Self {
        Self::is(Primitive::Comm(name.as_ref().to_owned()))
    }

    /// While a thread in this cgroup, or in one below it, runs: a directory of the cgroup2 hierarchy, by its path in the
    /// file system, or by that below the hierarchy's root.
    ///
    /// # Errors
    ///
    /// `attach` fails where there is no such cgroup, or it can't be told how deep in the hierarchy it is, as in a cgroup
    /// namespace.
    pub fn cgroup(path: impl Into<PathBuf>) -> Self {
        Self::is(Primitive::Cgroup(path.into()))
    }

    /// Packets with this mark (`skb->mark`), as far as the bits of the mask go; `u32::MAX` is the whole mark.
    ///
    /// # Errors
    ///
    /// `attach` fails if the value has bits that the mask hasn't.
    pub fn mark(value: u32, mask: u32) -> Self {
        Self::is(Primitive::Mark { value, mask })
    }

    /// Packets of this length in bytes (`skb->len`): what the kernel has of the packet at that moment, from the header of
    /// the layer that it is in.
    ///
    /// ```
    /// use dwell::Filter;
    ///
    /// assert_eq!(Filter::length(1000..).to_string(), "greater 1000");
    /// assert_eq!(Filter::length(..100), Filter::length(0..=99));
    /// ```
    pub fn length(bytes: impl RangeBounds<u32>) -> Self {
        // An end that can't be, such as that of 0..0, leaves a range without lengths, which attach refuses.
        const NONE: (u32, u32) = (1, 0);
        let low = match bytes.start_bound() {
            Bound::Included(low) => Some(*low),
            Bound::Excluded(low) => low.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let high = match bytes.end_bound() {
            Bound::Included(high) => Some(*high),
            Bound::Excluded(high) => high.checked_sub(1),
            Bound::Unbounded => Some(u32::MAX),
        };
        let (low, high) = low.zip(high).unwrap_or(NONE);
        Self::is(Primitive::Length { low, high })
    }

    /// Packets that pass an expression of `pcap-filter(7)`, compiled by libpcap for packets that begin with their IP
    /// header (`DLT_RAW`). Wherever the kernel is in the packet, lengths and offsets are counted from there on, and tags of
    /// VLANs lie before it. What isn't IP, as ARP, is read from its own header on. Of a packet within another, the outer
    /// one is looked at. libpcap looks names of hosts and ports up.
    ///
    /// As in libpcap, an expression that asks for what lies beyond the packet's end, or divides by zero, is false as a
    /// whole, whatever `not` is in it; [`!`](Self::not) makes that true. Where the IP header isn't written yet, and where
    /// it asks for what is in the packet but outside its linear part, as TCP's data often is, it can't be told: it is
    /// neither true nor false, as any other test, and counted as [`unparsed`](crate::SpanLedger::unparsed) where that
    /// decides.
    ///
    /// The kernel goes through it once for each packet, before all other tests.
    ///
    /// ```
    /// use dwell::Filter;
    ///
    /// let opens = Filter::pcap("tcp[tcpflags] & tcp-syn != 0")?;
    /// assert_eq!((opens & Filter::ipv4()).to_string(), "pcap \"tcp[tcpflags] & tcp-syn != 0\" and ip");
    /// # Ok::<(), dwell::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PcapSyntax`](crate::ErrorKind::PcapSyntax) if libpcap doesn't understand it;
    /// [`PcapTooLong`](crate::ErrorKind::PcapTooLong) if it takes more than 128 instructions;
    /// [`PcapUnsupported`](crate::ErrorKind::PcapUnsupported) if it loops, as `protochain` does, or its arithmetic is
    /// nested too deeply. `attach` fails if a span has more than one expression, its probe's included.
    #[cfg(feature = "pcap")]
    pub fn pcap(expression: impl AsRef<str>) -> Result<Self, crate::Error> {
        Self::of_pcap(expression.as_ref())
    }

    /// Packets that pass both; the same as `&`.
    pub fn and(self, other: Self) -> Self {
        self.joined(Join::All, other)
    }

    /// Packets that pass at least one; the same as `|`.
    pub fn or(self, other: Self) -> Self {
        self.joined(Join::Any, other)
    }

    /// Packets that don't pass it; the same as `!`.
    #[allow(clippy::should_implement_trait)] // It does; this one needs no `use`.
    pub fn not(mut self) -> Self {
        match self.parts.last() {
            Some(Part::Not) => {
                self.parts.pop();
            }
            _ => self.parts.push(Part::Not),
        }
        self
    }

    fn of_pcap(expression: &str) -> Result<Self, crate::Error> {
        Ok(Self::is(Primitive::Pcap(Pcap::compile(expression)?)))
    }

    /// Its pcap expressions.
    fn pcaps(&self) -> impl Iterator<Item = &Pcap> {
        self.parts.iter().filter_map(|part| match part {
            Part::Is(Primitive::Pcap(pcap)) => Some(pcap),
            _ => None,
        })
    }

    fn is(primitive: Primitive) -> Self {
        Self { parts: vec![Part::Is(primitive)] }
    }

    fn joined(mut self, join: Join, mut other: Self) -> Self {
        let operands = self.take(join) + other.take(join);
        self.parts.append(&mut other.parts);
        self.parts.push(Part::Join(join, operands));
        self
    }

    /// Takes such a join off its end, and says how many operands there are now.
    fn take(&mut self, join: Join) -> usize {
        match self.parts.last() {
            Some(Part::Join(last, operands)) if *last == join => {
                let operands = *operands;
                self.parts.pop();
                operands
            }
            _ => 1,
        }
    }

    /// What passes all of those that there are; `None`: there are none.
    pub(crate) fn all(filters: [Option<Self>; 2]) -> Option<Self> {
        filters.into_iter().flatten().reduce(Self::and)
    }

    /// What is wrong with it, as far as can be said without this host.
    pub(crate) fn complaint(&self) -> Option<String> {
        self.parts.iter().find_map(|part| match part {
            Part::Is(primitive) => primitive.complaint(),
            Part::Not | Part::Join(..) => None,
        })
    }

    /// The operands of each part, by their places.
    fn operands(&self) -> Vec<Vec<usize>> {
        let mut waiting = Vec::new();
        let parts = self.parts.iter().enumerate();
        let operands = parts.map(|(place, part)| {
            let count = match part {
                Part::Is(_) => 0,
                Part::Not => 1,
                Part::Join(_, count) => *count,
            };
            let operands = waiting.split_off(waiting.len().saturating_sub(count));
            waiting.push(place);
            operands
        });
        operands.collect()
    }
}

impl BitAnd for Filter {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        self.and(other)
    }
}

impl BitOr for Filter {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.or(other)
    }
}

impl Not for Filter {
    type Output = Self;

    fn not(self) -> Self {
        self.not()
    }
}

/// As [`FromStr`](std::str::FromStr) reads it, with parentheses also where tcpdump's precedence doesn't ask for them.
impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        enum Piece {
            Text(&'static str),
            Part(usize),
            /// In parentheses, if it is joined.
            Operand(usize),
        }
        let operands = self.operands();
        // What is still to be written, the next at the end.
        let mut pieces = vec![Piece::Part(self.parts.len().saturating_sub(1))];
        while let Some(piece) = pieces.pop() {
            match piece {
                Piece::Text(text) => f.write_str(text)?,
                Piece::Operand(place) => match self.parts.get(place) {
                    Some(Part::Join(..)) => {
                        pieces.extend([Piece::Text(")"), Piece::Part(place), Piece::Text("(")]);
                    }
                    _ => pieces.push(Piece::Part(place)),
                },
                Piece::Part(place) => {
                    let word = match self.parts.get(place) {
                        Some(Part::Is(primitive)) => {
                            primitive.fmt(f)?;
                            continue;
                        }
                        Some(Part::Join(Join::All, _)) => " and ",
                        Some(Part::Join(Join::Any, _)) => " or ",
                        Some(Part::Not) | None => {
                            f.write_str("not ")?;
                            ""
                        }
                    };
                    let of_this = operands.get(place).map_or(&[][..], Vec::as_slice);
                    for (n, operand) in of_this.iter().enumerate().rev() {
                        pieces.push(Piece::Operand(*operand));
                        if n > 0 {
                            pieces.push(Piece::Text(word));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(port: u16) -> Filter {
        Filter::port(port)
    }

    /// Methods and operators are the same, and what differs in parentheses only is equal.
    #[test]
    fn combines() {
        let (a, b, c) = (|| port(1), || port(2), || port(3));
        assert_eq!((a() & b()) & c(), a().and(b().and(c())));
        assert_eq!((a() | b()) | c(), a().or(b().or(c())));
        assert_eq!(!!a(), a());
        assert_eq!(!a(), a().not());
        assert_ne!((a() & b()) | c(), a() & (b() | c()));
        assert_ne!(a() & b(), b() & a());
        assert_ne!(!(a() & b()), !a() & b());
    }

    /// Parentheses leave no doubt.
    #[test]
    fn shows() {
        let shown = |filter: Filter| filter.to_string();
        assert_eq!(shown(port(1) & port(2) & port(3)), "port 1 and port 2 and port 3");
        assert_eq!(shown(port(1) & port(2) | port(3)), "(port 1 and port 2) or port 3");
        assert_eq!(shown(port(1) & (port(2) | !port(3))), "port 1 and (port 2 or not port 3)");
        assert_eq!(shown(!(port(1) | port(2)) & port(3)), "not (port 1 or port 2) and port 3");
        assert_eq!(shown(!(port(1) & !(port(2) | port(3)))), "not (port 1 and not (port 2 or port 3))");
    }

    /// Lengths are taken as any range is; what has none is refused later.
    #[test]
    fn lengths() {
        assert_eq!(Filter::length(..), Filter::length(0..=u32::MAX));
        assert_eq!(Filter::length(5..10), Filter::length(5..=9));
        assert_eq!(Filter::length((Bound::Excluded(5), Bound::Unbounded)), Filter::length(6..));
        for none in [Filter::length(0..0), Filter::length((Bound::Excluded(u32::MAX), Bound::Unbounded))] {
            assert!(none.complaint().is_some(), "{none}");
        }
        assert_eq!((port(1) & !Filter::length(7..=7)).complaint(), None);
        assert!((port(1) & !Filter::length(7..7)).complaint().is_some());
    }

    /// However deep it is, nothing recurses.
    #[test]
    fn depth() {
        let mut deep = port(1);
        for _ in 0..100_000 {
            deep = !((deep & port(2)) | port(3));
        }
        assert_eq!(deep.clone(), deep);
        assert!(deep.to_string().ends_with(" and port 2) or port 3)"));
        assert_eq!(deep.complaint(), None);
        assert!(format!("{deep:?}").len() > 100_000);
    }
}
