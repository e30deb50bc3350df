//! From a filter to the tests that the kernel makes of a packet.

use super::host::Host;
use super::primitive::{At, COMM_BYTES, End, Interface, Netns, Primitive, Side};
use super::{Filter, Instruction, Join, Part};
use crate::error::{Error, ErrorKind};

/// How many tests there is room for in the kernel.
pub(crate) const MAX_TESTS: usize = 32;
/// A target that isn't a test: the packet passes.
pub(crate) const ACCEPT: u32 = 254;
/// A target that isn't a test: the packet doesn't pass.
pub(crate) const REJECT: u32 = 255;

/// What a test looks at; the numbers are those of `enum dwell_field`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Field {
    SourceAddress = 1,
    DestinationAddress = 2,
    SourcePort = 3,
    DestinationPort = 4,
    LocalPort = 5,
    RemotePort = 6,
    Protocol = 7,
    Version = 8,
    Length = 9,
    Mark = 10,
    Interface = 11,
    ReceiveInterface = 12,
    Netns = 13,
    Pid = 14,
    Tid = 15,
    Comm = 16,
    Cgroup = 17,
    Pcap = 18,
}

/// One test of a packet, as `struct dwell_test`.
///
/// Numbers: whether `low[0] <= (value & mask[0]) <= high`. Addresses and names of threads: whether each word, taken from
/// memory as it is and masked, is that of `low`; of addresses `high` is the IP version. Cgroups: `low` has the two halves
/// of the id, the lower first, `high` the depth below the hierarchy's root. Of the pcap expression nothing: there is one.
///
/// What can't be known of a packet makes its test neither true nor false, and the kernel takes the ways of both. For
/// that every NOT is at a single test: `negated` says that there is one, and that the targets have been swapped for it.
/// So the target for "what is asked for holds" is `if negated { on_false } else { on_true }`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Test {
    pub(crate) field: Field,
    pub(crate) negated: bool,
    /// Where it goes on if the test is true: a later test, [`ACCEPT`] or [`REJECT`].
    pub(crate) on_true: u32,
    pub(crate) on_false: u32,
    pub(crate) mask: [u32; 4],
    pub(crate) low: [u32; 4],
    pub(crate) high: u32,
}

impl Field {
    /// What it is to a person.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SourceAddress | Self::DestinationAddress => "address",
            Self::SourcePort | Self::DestinationPort | Self::LocalPort | Self::RemotePort => "port",
            Self::Protocol => "protocol",
            Self::Version => "IP version",
            Self::Length => "length",
            Self::Mark => "mark",
            Self::Interface | Self::ReceiveInterface => "interface",
            Self::Netns => "network namespace",
            Self::Pid => "pid",
            Self::Tid => "tid",
            Self::Comm => "thread name",
            Self::Cgroup => "cgroup",
            Self::Pcap => "pcap expression",
        }
    }
}

impl Test {
    /// Whether it takes more than the thread that runs, and the packet's own bytes.
    pub(crate) fn needs_subject(&self) -> bool {
        !matches!(self.field, Field::Pid | Field::Tid | Field::Comm | Field::Pcap)
    }
}

impl Filter {
    /// The tests, the first of which begins. Without any, all packets pass.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) for what can't be, and for a filter that no packet passes;
    /// [`FilterTooLong`](ErrorKind::FilterTooLong) for more than [`MAX_TESTS`];
    /// [`PcapTwice`](ErrorKind::PcapTwice) for several pcap expressions; and those of [`Host`], for what isn't here.
    pub(crate) fn compile(&self) -> Result<Vec<Test>, Error> {
        self.compile_on(&Host::new())
    }

    fn compile_on(&self, host: &Host) -> Result<Vec<Test>, Error> {
        if let Some(complaint) = self.complaint() {
            return Err(Error::config("filter", complaint));
        }
        self.check_pcaps()?;
        let tests = self.parts.iter().map(Part::tests).sum();
        // From here on it is small, and so not deep: joins have two operands at least.
        if tests > MAX_TESTS {
            return Err(ErrorKind::FilterTooLong { tests, most: MAX_TESTS }.into());
        }
        let mut tests = Vec::with_capacity(tests);
        match self.tree(host)? {
            Node::Constant(true) => {}
            Node::Constant(false) => {
                return Err(Error::config("filter", format!("no packet passes the filter `{self}`")));
            }
            node => node.write(&mut tests, ACCEPT, REJECT),
        }
        Ok(tests)
    }

    /// What its pcap expression was compiled to; nothing where there is none.
    pub(crate) fn instructions(&self) -> Vec<Instruction> {
        self.pcaps().next().map_or(Vec::new(), |pcap| pcap.instructions.clone())
    }

    /// That there is one at most.
    fn check_pcaps(&self) -> Result<(), Error> {
        let Some(first) = self.pcaps().next() else { return Ok(()) };
        match self.pcaps().find(|other| other.instructions != first.instructions) {
            None => Ok(()),
            Some(second) => {
                let [first, second] = [first, second].map(|pcap| pcap.expression.clone());
                Err(ErrorKind::PcapTwice { first, second }.into())
            }
        }
    }

    /// The same as a tree, every NOT at a single test.
    fn tree(&self, host: &Host) -> Result<Node, Error> {
        let mut nodes = Vec::new();
        for part in &self.parts {
            let node = match part {
                Part::Is(primitive) => Node::of(primitive, host)?,
                Part::Not => nodes.pop().map_or(Node::Constant(true), Node::inverse),
                Part::Join(join, count) => Node::joined(*join, nodes.split_off(nodes.len().saturating_sub(*count))),
            };
            nodes.push(node);
        }
        Ok(nodes.pop().unwrap_or(Node::Constant(true)))
    }
}

impl Part {
    /// How many tests it takes, at most.
    fn tests(&self) -> usize {
        match self {
            Self::Is(Primitive::Address(End::Either, _) | Primitive::Port(End::Either, _)) => 2,
            Self::Is(_) => 1,
            Self::Not | Self::Join(..) => 0,
        }
    }
}

#[derive(Debug)]
enum Node {
    /// Known without a packet.
    Constant(bool),
    /// A test without targets.
    Leaf(Test),
    Joined(Join, Vec<Node>),
}

impl Node {
    fn of(primitive: &Primitive, host: &Host) -> Result<Self, Error> {
        let number = |field, number| Self::range(field, number, number);
        Ok(match primitive {
            Primitive::Protocol(protocol) => number(Field::Protocol, protocol.0.into()),
            Primitive::Ipv4 => number(Field::Version, 4),
            Primitive::Ipv6 => number(Field::Version, 6),
            Primitive::Address(end, prefix) => at(*end, Field::SourceAddress, Field::DestinationAddress, |field| {
                let (version, address, mask) = prefix.pattern();
                Self::leaf(field, words(&mask), words(&address), version)
            }),
            Primitive::Port(end, ports) => at(*end, Field::SourcePort, Field::DestinationPort, |field| {
                Self::range(field, ports.low.into(), ports.high.into())
            }),
            Primitive::SidePort(side, ports) => {
                let field = if *side == Side::Local { Field::LocalPort } else { Field::RemotePort };
                Self::range(field, ports.low.into(), ports.high.into())
            }
            Primitive::Interface(at, interface) => {
                let field = if *at == At::Now { Field::Interface } else { Field::ReceiveInterface };
                let index = match interface {
                    Interface::Index(index) => *index,
                    Interface::Name(name) => host.interface(name)?,
                };
                number(field, index)
            }
            Primitive::Netns(netns) => {
                let inode = match netns {
                    Netns::Inode(inode) => *inode,
                    Netns::Path(path) => host.netns(path)?,
                    Netns::OfPid(pid) => host.netns_of_pid(*pid)?,
                };
                number(Field::Netns, inode)
            }
            Primitive::Pid(pid) => {
                host.check_pids(primitive)?;
                number(Field::Pid, *pid)
            }
            Primitive::Tid(tid) => {
                host.check_pids(primitive)?;
                number(Field::Tid, *tid)
            }
            Primitive::Comm(name) => {
                let mut padded = [0; 16];
                padded.iter_mut().zip(name.iter().take(COMM_BYTES)).for_each(|(to, from)| *to = *from);
                Self::leaf(Field::Comm, [u32::MAX; 4], words(&padded), 0)
            }
            Primitive::Cgroup(path) => {
                let cgroup = host.cgroup(path)?;
                let halves = [cgroup.id as u32, (cgroup.id >> 32) as u32, 0, 0];
                Self::leaf(Field::Cgroup, [u32::MAX; 4], halves, cgroup.depth)
            }
            Primitive::Mark { mask: 0, .. } | Primitive::Length { low: 0, high: u32::MAX } => Self::Constant(true),
            Primitive::Mark { value, mask } => {
                Self::leaf(Field::Mark, [*mask, u32::MAX, u32::MAX, u32::MAX], [*value, 0, 0, 0], *value)
            }
            Primitive::Length { low, high } => Self::range(Field::Length, *low, *high),
            Primitive::Pcap(_) => number(Field::Pcap, 0),
        })
    }

    fn range(field: Field, low: u32, high: u32) -> Self {
        Self::leaf(field, [u32::MAX; 4], [low, 0, 0, 0], high)
    }

    fn leaf(field: Field, mask: [u32; 4], low: [u32; 4], high: u32) -> Self {
        Self::Leaf(Test { field, negated: false, on_true: ACCEPT, on_false: REJECT, mask, low, high })
    }

    /// All of them, or any; without those that are known.
    fn joined(join: Join, nodes: Vec<Self>) -> Self {
        // What doesn't matter for ALL is true, and what decides it is false; for ANY it is the other way round.
        let neutral = join == Join::All;
        if nodes.iter().any(|node| matches!(node, Self::Constant(known) if *known != neutral)) {
            return Self::Constant(!neutral);
        }
        let mut open: Vec<_> = nodes.into_iter().filter(|node| !matches!(node, Self::Constant(_))).collect();
        match (open.pop(), open.is_empty()) {
            (None, _) => Self::Constant(neutral),
            (Some(only), true) => only,
            (Some(last), false) => {
                open.push(last);
                Self::Joined(join, open)
            }
        }
    }

    /// NOT of it, by De Morgan's laws.
    fn inverse(self) -> Self {
        match self {
            Self::Constant(known) => Self::Constant(!known),
            Self::Leaf(test) => Self::Leaf(Test { negated: !test.negated, ..test }),
            Self::Joined(join, nodes) => {
                let join = if join == Join::All { Join::Any } else { Join::All };
                Self::Joined(join, nodes.into_iter().map(Self::inverse).collect())
            }
        }
    }

    fn tests(&self) -> usize {
        match self {
            Self::Constant(_) => 0,
            Self::Leaf(_) => 1,
            Self::Joined(_, nodes) => nodes.iter().map(Self::tests).sum(),
        }
    }

    /// Adds its tests, with where they go if it holds and if it doesn't.
    fn write(self, tests: &mut Vec<Test>, holds: u32, fails: u32) {
        match self {
            // Only a whole filter is one, and that has no tests.
            Self::Constant(_) => {}
            Self::Leaf(test) => {
                let (on_true, on_false) = if test.negated { (fails, holds) } else { (holds, fails) };
                tests.push(Test { on_true, on_false, ..test });
            }
            Self::Joined(join, nodes) => {
                let last = nodes.len().saturating_sub(1);
                for (n, node) in nodes.into_iter().enumerate() {
                    let next = (tests.len() + node.tests()) as u32;
                    match join {
                        _ if n == last => node.write(tests, holds, fails),
                        Join::All => node.write(tests, next, fails),
                        Join::Any => node.write(tests, holds, next),
                    }
                }
            }
        }
    }
}

/// At one end, or at either.
fn at(end: End, source: Field, destination: Field, node: impl Fn(Field) -> Node) -> Node {
    match end {
        End::Source => node(source),
        End::Destination => node(destination),
        End::Either => Node::Joined(Join::Any, vec![node(source), node(destination)]),
    }
}

/// As a program reads them from memory.
fn words(bytes: &[u8; 16]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = bytes.try_into().map_or(0, u32::from_ne_bytes);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compile(text: &str) -> Vec<Test> {
        text.parse::<Filter>().unwrap().compile().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// Of each test: what it looks at, whether it is negated, where it goes.
    fn ways(text: &str) -> Vec<(Field, bool, u32, u32)> {
        compile(text).iter().map(|test| (test.field, test.negated, test.on_true, test.on_false)).collect()
    }

    /// The layout that the kernel's programs expect.
    #[test]
    fn values() {
        let test = |text: &str| compile(text).remove(0);
        let port = test("dst port 443");
        assert_eq!((port.field, port.mask[0], port.low[0], port.high), (Field::DestinationPort, u32::MAX, 443, 443));
        let mark = test("mark 0x10/0xf0");
        assert_eq!((mark.field, mark.mask[0], mark.low[0], mark.high), (Field::Mark, 0xf0, 0x10, 0x10));
        let length = test("greater 100");
        assert_eq!((length.field, length.low[0], length.high), (Field::Length, 100, u32::MAX));
        let net = test("src net 10.128.0.0/9");
        assert_eq!((net.field, net.high), (Field::SourceAddress, 4));
        assert_eq!(net.low, [u32::from_ne_bytes([10, 128, 0, 0]), 0, 0, 0]);
        assert_eq!(net.mask, [u32::from_ne_bytes([255, 128, 0, 0]), 0, 0, 0]);
        let host = test("dst host 1:203::4");
        assert_eq!((host.field, host.high, host.mask), (Field::DestinationAddress, 6, [u32::MAX; 4]));
        assert_eq!(host.low, [u32::from_ne_bytes([0, 1, 2, 3]), 0, 0, u32::from_ne_bytes([0, 0, 0, 4])]);
        let comm = test("comm abcde");
        assert_eq!((comm.field, comm.high, comm.mask), (Field::Comm, 0, [u32::MAX; 4]));
        assert_eq!(comm.low, [u32::from_ne_bytes(*b"abcd"), u32::from_ne_bytes(*b"e\0\0\0"), 0, 0]);
        let fields = [
            ("src port 1", Field::SourcePort, 1),
            ("local port 2", Field::LocalPort, 2),
            ("remote port 3", Field::RemotePort, 3),
            ("sctp", Field::Protocol, 132),
            ("ip6", Field::Version, 6),
            ("dev 4", Field::Interface, 4),
            ("iif 5", Field::ReceiveInterface, 5),
            ("netns 4026531840", Field::Netns, 4_026_531_840),
        ];
        for (text, field, value) in fields {
            let test = test(text);
            assert_eq!((test.field, test.low[0], test.high, test.mask[0]), (field, value, value, u32::MAX), "{text}");
        }
        assert_eq!((Field::SourceAddress as u32, Field::Version as u32, Field::Cgroup as u32), (1, 8, 17));
    }

    /// The shortest way to an answer; NOT is at single tests, whose targets are swapped.
    #[test]
    fn jumps() {
        use Field::{DestinationPort, Protocol, SourcePort, Version};
        assert_eq!(ways("udp"), [(Protocol, false, ACCEPT, REJECT)]);
        assert_eq!(ways("not udp"), [(Protocol, true, REJECT, ACCEPT)]);
        assert_eq!(ways("udp and ip"), [(Protocol, false, 1, REJECT), (Version, false, ACCEPT, REJECT)]);
        assert_eq!(ways("udp or ip"), [(Protocol, false, ACCEPT, 1), (Version, false, ACCEPT, REJECT)]);
        assert_eq!(ways("not (udp and ip)"), [(Protocol, true, 1, ACCEPT), (Version, true, REJECT, ACCEPT)]);
        assert_eq!(
            ways("udp and (port 53 or not ip)"),
            [
                (Protocol, false, 1, REJECT),
                (SourcePort, false, ACCEPT, 2),
                (DestinationPort, false, ACCEPT, 3),
                (Version, true, REJECT, ACCEPT),
            ]
        );
        assert_eq!(ways("not port 53"), [(SourcePort, true, REJECT, 1), (DestinationPort, true, REJECT, ACCEPT)]);
    }

    /// What is known without a packet takes no test.
    #[test]
    fn constants() {
        assert_eq!(compile("greater 0"), []);
        assert_eq!(compile("mark 0/0 or udp"), []);
        assert_eq!(ways("udp and (mark 0/0 or ip)"), ways("udp"));
        assert_eq!(ways("udp or (not mark 0/0 and ip)"), ways("udp"));
        let never: Filter = "udp and not greater 0".parse().unwrap();
        assert_eq!(never.compile().unwrap_err().to_string(), "no packet passes the filter `udp and not greater 0`");
    }

    /// As many tests as there is room for; one more is refused, with what it takes, however deep it is.
    #[test]
    fn too_long() {
        let ports = |count: u16| (1..count).fold(Filter::source_port(0), |all, port| all | Filter::source_port(port));
        assert_eq!(ports(32).compile().unwrap().len(), 32);
        let error = ports(33).compile().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::FilterTooLong { tests: 33, most: 32 }), "{error}");
        let error = (ports(31) & Filter::port(1)).compile().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::FilterTooLong { tests: 33, .. }), "{error}");
        let deep = (0..100_000).fold(Filter::ipv4(), |deep, _| !(deep & Filter::ipv6()) | Filter::ipv4());
        let error = deep.compile().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::FilterTooLong { tests: 200_001, .. }), "{error}");
    }

    /// What can't be is refused, and what isn't here.
    #[test]
    fn refuses() {
        let error = |filter: Filter| filter.compile().unwrap_err().to_string();
        assert!(error(Filter::ipv4() | Filter::mark(2, 1)).contains("no mark is 0x2"));
        assert!(error(Filter::comm("1234567890123456")).contains("keeps 15 bytes"));
        assert!(error(Filter::ipv4() & !Filter::interface("no-such-dev")).contains("no interface `no-such-dev`"));
    }

    /// Names are looked up: the loopback device has the index 1 in every namespace.
    #[test]
    fn looks_up() {
        assert_eq!(compile("dev lo"), compile("dev 1"));
        assert_eq!(compile("iif lo"), compile("iif 1"));
        let own = compile(&format!("netns pid {}", std::process::id()));
        assert_eq!(own, compile("netns /proc/self/ns/net"));
        assert_eq!(own[0].low[0], own[0].high);
    }
}
