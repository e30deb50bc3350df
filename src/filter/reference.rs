//! What a filter means, in three-valued logic, and what its tests come to: both must agree.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::compile::{ACCEPT, Field, MAX_TESTS, REJECT, Test};
use super::primitive::{At, End, Interface, Netns, Primitive, Side};
use super::random::Random;
use super::value::{Ports, Prefix, Protocol};
use super::{Filter, Join, Part};

/// A packet, of which not everything need be known.
#[derive(Debug)]
struct Packet {
    addresses: [Option<IpAddr>; 2],
    /// Source, destination, local, remote.
    ports: [Option<u16>; 4],
    protocol: Option<u8>,
    version: Option<u8>,
    length: Option<u32>,
    mark: Option<u32>,
    /// Where it is, where it was received.
    interfaces: [Option<u32>; 2],
    netns: Option<u32>,
    pid: Option<u32>,
    tid: Option<u32>,
    comm: Option<&'static [u8]>,
}

const ADDRESSES: [IpAddr; 4] = [
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
    IpAddr::V4(Ipv4Addr::new(10, 200, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xa00, 1, 0, 0, 0, 0, 0, 0)),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];
const COMMS: [&[u8]; 4] = [b"", b"a", b"ab", b"123456789012345"];

/// Each of a few values that filters ask for, too, and often none.
fn packet(random: &mut Random) -> Packet {
    let unknown = random.below(4);
    let known = |random: &mut Random| random.below(4) >= unknown;
    let small = |random: &mut Random| known(random).then(|| random.below(3) as u32);
    Packet {
        addresses: [0; 2].map(|_| known(random).then(|| random.pick(&ADDRESSES))),
        ports: [0; 4].map(|_| small(random).map(|port| port as u16)),
        protocol: known(random).then(|| random.pick(&[6, 17])),
        version: known(random).then(|| random.pick(&[4, 6])),
        length: small(random),
        mark: known(random).then(|| random.pick(&[0, 1, 0x101, 0x8000_0001])),
        interfaces: [0; 2].map(|_| small(random)),
        netns: small(random),
        pid: small(random),
        tid: small(random),
        comm: known(random).then(|| random.pick(&COMMS)),
    }
}

/// One that packets like these may well pass. No cgroup: that has to be looked up.
fn primitive(random: &mut Random) -> Primitive {
    let end = random.pick(&[End::Source, End::Destination, End::Either]);
    let ports = |random: &mut Random| {
        let (a, b) = (random.below(3) as u16, random.below(3) as u16);
        Ports { low: a.min(b), high: a.max(b) }
    };
    let small = |random: &mut Random| random.below(3) as u32;
    match random.below(12) {
        0 => Primitive::Protocol(Protocol(random.pick(&[6, 17]))),
        1 => random.pick(&[Primitive::Ipv4, Primitive::Ipv6]),
        2 | 3 => {
            let any = ["0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/9", "10.0.0.1", "::/0", "a00::/16", "::1", "::/127"];
            Primitive::Address(end, random.pick(&any).parse().unwrap())
        }
        4 => Primitive::Port(end, ports(random)),
        5 => Primitive::SidePort(random.pick(&[Side::Local, Side::Remote]), ports(random)),
        6 => Primitive::Interface(random.pick(&[At::Now, At::Received]), Interface::Index(small(random).max(1))),
        7 => Primitive::Netns(Netns::Inode(small(random))),
        8 => Primitive::Comm(random.pick(&COMMS).to_vec()),
        9 => {
            let mask = random.pick(&[u32::MAX, 0xff, 0, 0x8000_0000]);
            Primitive::Mark { value: random.pick(&[0, 1, 0x101, 0x8000_0001]) & mask, mask }
        }
        10 => Primitive::Length { low: small(random), high: random.pick(&[2, u32::MAX]) },
        _ => Primitive::Length { low: 0, high: random.pick(&[0, 1, u32::MAX]) },
    }
}

/// What one thing that is asked comes to, by its meaning.
fn holds(primitive: &Primitive, packet: &Packet) -> Option<bool> {
    let ends = |end: End, at: &dyn Fn(usize) -> Option<bool>| match end {
        End::Source => at(0),
        End::Destination => at(1),
        End::Either => any([at(0), at(1)]),
    };
    let within = |ports: &Ports, port: Option<u16>| port.map(|port| (ports.low..=ports.high).contains(&port));
    let contains = |prefix: &Prefix, address: IpAddr| match (prefix.address(), address) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= u32::from(prefix.bits()),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= u32::from(prefix.bits()),
        _ => false,
    };
    match primitive {
        Primitive::Protocol(protocol) => packet.protocol.map(|number| number == protocol.0),
        Primitive::Ipv4 => packet.version.map(|version| version == 4),
        Primitive::Ipv6 => packet.version.map(|version| version == 6),
        Primitive::Address(end, prefix) => {
            ends(*end, &|at| packet.addresses[at].map(|address| contains(prefix, address)))
        }
        Primitive::Port(end, ports) => ends(*end, &|at| within(ports, packet.ports[at])),
        Primitive::SidePort(Side::Local, ports) => within(ports, packet.ports[2]),
        Primitive::SidePort(Side::Remote, ports) => within(ports, packet.ports[3]),
        Primitive::Interface(at, Interface::Index(index)) => {
            packet.interfaces[usize::from(*at == At::Received)].map(|at| at == *index)
        }
        Primitive::Netns(Netns::Inode(inode)) => packet.netns.map(|netns| netns == *inode),
        Primitive::Pid(pid) => packet.pid.map(|running| running == *pid),
        Primitive::Tid(tid) => packet.tid.map(|running| running == *tid),
        Primitive::Comm(name) => packet.comm.map(|comm| comm == name),
        // What any packet has needn't be known.
        Primitive::Mark { mask: 0, .. } | Primitive::Length { low: 0, high: u32::MAX } => Some(true),
        Primitive::Mark { value, mask } => packet.mark.map(|mark| mark & mask == *value),
        Primitive::Length { low, high } => packet.length.map(|length| (*low..=*high).contains(&length)),
        other => panic!("{other:?} has to be looked up"),
    }
}

fn any(values: impl IntoIterator<Item = Option<bool>>) -> Option<bool> {
    let values: Vec<_> = values.into_iter().collect();
    if values.contains(&Some(true)) {
        return Some(true);
    }
    if values.contains(&None) { None } else { Some(false) }
}

fn all(values: impl IntoIterator<Item = Option<bool>>) -> Option<bool> {
    any(values.into_iter().map(|value| value.map(|value| !value))).map(|value| !value)
}

/// What the filter comes to, in Kleene's logic.
fn meaning(filter: &Filter, packet: &Packet) -> Option<bool> {
    let mut values: Vec<Option<bool>> = Vec::new();
    for part in &filter.parts {
        let value = match part {
            Part::Is(primitive) => holds(primitive, packet),
            Part::Not => values.pop().unwrap().map(|value| !value),
            Part::Join(Join::All, count) => all(values.split_off(values.len() - count)),
            Part::Join(Join::Any, count) => any(values.split_off(values.len() - count)),
        };
        values.push(value);
    }
    values[0]
}

/// What the kernel makes of one test.
fn result(test: &Test, packet: &Packet) -> Option<bool> {
    let number = |value: Option<u32>| {
        value.map(|value| test.low[0] <= value & test.mask[0] && value & test.mask[0] <= test.high)
    };
    let words = |bytes: [u8; 16]| {
        (0..4).all(|n| {
            let word = u32::from_ne_bytes(bytes[n * 4..][..4].try_into().unwrap());
            word & test.mask[n] == test.low[n]
        })
    };
    let address = |address: IpAddr| {
        let mut bytes = [0; 16];
        match address {
            IpAddr::V4(v4) => bytes[..4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => bytes = v6.octets(),
        }
        test.high == if address.is_ipv4() { 4 } else { 6 } && words(bytes)
    };
    match test.field {
        Field::SourceAddress => packet.addresses[0].map(address),
        Field::DestinationAddress => packet.addresses[1].map(address),
        Field::SourcePort => number(packet.ports[0].map(u32::from)),
        Field::DestinationPort => number(packet.ports[1].map(u32::from)),
        Field::LocalPort => number(packet.ports[2].map(u32::from)),
        Field::RemotePort => number(packet.ports[3].map(u32::from)),
        Field::Protocol => number(packet.protocol.map(u32::from)),
        Field::Version => number(packet.version.map(u32::from)),
        Field::Length => number(packet.length),
        Field::Mark => number(packet.mark),
        Field::Interface => number(packet.interfaces[0]),
        Field::ReceiveInterface => number(packet.interfaces[1]),
        Field::Netns => number(packet.netns),
        Field::Pid => number(packet.pid),
        Field::Tid => number(packet.tid),
        Field::Comm => packet.comm.map(|comm| {
            let mut bytes = [0; 16];
            bytes[..comm.len()].copy_from_slice(comm);
            words(bytes)
        }),
        Field::Cgroup | Field::Pcap => panic!("no filter here has one"),
    }
}

/// Whether a packet passes, if what isn't known holds, or doesn't.
fn passes(tests: &[Test], packet: &Packet, unknown_holds: bool) -> bool {
    let mut at = if tests.is_empty() { ACCEPT } else { 0 };
    while at != ACCEPT && at != REJECT {
        let test = &tests[at as usize];
        let is_true = result(test, packet).unwrap_or(unknown_holds != test.negated);
        let next = if is_true { test.on_true } else { test.on_false };
        assert!(next > at, "{tests:?}");
        at = next;
    }
    at == ACCEPT
}

/// For any filter and any packet the tests come to what the filter means.
#[test]
fn tests_mean_what_the_filter_does() {
    let mut met = [0; 3];
    let (mut refused, mut longest) = (0, 0);
    for seed in 0..20_000 {
        let mut random = Random::new(seed);
        let primitives = 1 + random.below(12);
        let filter = random.filter(primitives, &mut primitive);
        let tests = match filter.compile() {
            Ok(tests) => tests,
            Err(error) => {
                assert!(error.to_string().starts_with("no packet passes the filter"), "{filter}: {error}");
                refused += 1;
                assert_eq!(meaning(&filter, &packet(&mut random)), Some(false), "{filter}");
                continue;
            }
        };
        longest = longest.max(tests.len());
        for _ in 0..30 {
            let packet = packet(&mut random);
            let expected = meaning(&filter, &packet);
            let found = match [false, true].map(|unknown_holds| passes(&tests, &packet, unknown_holds)) {
                [true, true] => Some(true),
                [false, true] => None,
                [false, false] => Some(false),
                [true, false] => panic!("seed {seed}: {filter}: what isn't known made it pass: {packet:?}"),
            };
            assert_eq!(found, expected, "seed {seed}: {filter}: {packet:?} {tests:#?}");
            met[expected.map_or(2, usize::from)] += 1;
        }
    }
    println!("fails, passes, unknown: {met:?}; nothing passes {refused}; longest {longest}");
    assert!(met.iter().all(|count| *count > 50_000) && refused > 0, "{met:?} {refused}");
    assert!(longest > 12 && longest <= MAX_TESTS, "{longest}");
}
