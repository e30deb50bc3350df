//! Packets of every kind that a filter may meet, each really of that form: what [`kinds`] says of them is tested in
//! `packets_selftest.rs`.
//!
//! All go from the left to the right, to port [`PORT`] unless the kind's name says otherwise. Nothing else is on the wire
//! but TCP's acknowledgements and what answers an echo request. [`seen`] says at which hooks a probe meets them.

mod frames;
pub mod seen;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};

use self::frames::*;
use crate::lab::{DEVICE, Ip, Lab, Side, accept, feed, sysctl, udp_port};
use crate::raw::{
    Frame, IPPROTO_IPV6, IPV6_HOPOPTS, SO_LINGER, SO_ZEROCOPY, SOL_SOCKET, SOL_UDP, UDP_SEGMENT, Wire, connect_from,
    given_back, offload_tags, send_file, send_uncopied, set_option,
};
use crate::support::{eventually, kernel_version, run};

/// Where datagrams and messages come from, and where they go.
pub const SOURCE_PORT: u16 = 4_000;
pub const PORT: u16 = 5_000;
/// Where fragments go whose later parts look as if they went to [`PORT`].
pub const OTHER_PORT: u16 = 6_000;
/// Where connections come from, and where they go: the second's bytes are the first's the other way round.
pub const CLIENT_PORT: u16 = 40_000;
pub const SERVER_PORT: u16 = 443;
pub const SWAPPED_PORT: u16 = 47_873;
/// Of devices with a tag, and of the outer one where there are two.
pub const VLAN: u16 = 5;
pub const SERVICE_VLAN: u16 = 7;

/// What the wire's IP networks are called within 10.0.0.0/8, as [`address`] takes them.
pub const WIRE: u8 = 77;
pub const TAGGED: u8 = 81;
pub const TWICE_TAGGED: u8 = 82;
pub const IN_VXLAN: u8 = 83;
pub const IN_IPIP: u8 = 84;

/// Sends one unit of a kind, and returns when it has arrived.
pub type Send<'a> = Box<dyn FnMut() + 'a>;

/// Frames: where, how many, and what each is.
pub type Wanted = (Place, usize, fn(&Frame) -> bool);

/// One kind of packets.
#[derive(Debug)]
pub struct Kind {
    pub name: &'static str,
    /// What sends it.
    pub by: &'static str,
    /// Makes the sockets; what makes packets of its own, such as a handshake, is over when it returns.
    pub prepare: fn(&Hosts) -> Send<'_>,
    /// The frames of a unit; no others go that way.
    pub frames: Vec<Wanted>,
    /// How many of those that arrive on the right, and are the right's own, have a part outside their linear data.
    pub paged: usize,
}

/// Where frames are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// As the left gives them to its device.
    Sent,
    /// As they arrive on the right, where a tag in the bytes has been taken out of them already.
    Received,
    /// On the left's loopback device.
    Loopback,
}

impl Place {
    pub const ALL: [Self; 3] = [Self::Sent, Self::Received, Self::Loopback];
}

/// Left and right, joined by a wire, and over that by VLANs and tunnels.
#[derive(Debug)]
pub struct Hosts {
    pub lab: Lab,
}

impl Hosts {
    pub fn new() -> Self {
        let lab = Lab::new();
        for side in [Side::Left, Side::Right] {
            let namespace = lab.namespace(side.name());
            feed(&format!("ip -n {namespace} -batch -"), &devices(side));
            // All follow the wire's device.
            let show = format!("ip -n {namespace} -br link show up");
            eventually("the devices are up", || !run(&show).contains("DOWN"));
        }
        // What is written at once is sent at once, however long packets take here.
        lab.left(|| sysctl("ipv4/tcp_min_tso_segs", "16"));
        Self { lab }
    }

    /// A socket on the left and one on the right, with the ports that all have; the left is connected.
    fn datagrams(&self, from: impl Into<SocketAddr>, to: impl Into<SocketAddr>) -> (UdpSocket, UdpSocket) {
        let (left, right) = self.unconnected(from, to);
        left.connect(right.local_addr().expect("it is bound")).expect("there is a route");
        (left, right)
    }

    fn unconnected(&self, from: impl Into<SocketAddr>, to: impl Into<SocketAddr>) -> (UdpSocket, UdpSocket) {
        let (from, to) = (from.into(), to.into());
        (self.lab.left(|| udp_port(from)), self.lab.right(|| udp_port(to)))
    }

    /// Datagrams over a network of IPv4, whatever it is made of.
    fn over(&self, network: u8) -> Send<'_> {
        sending(self.datagrams((address(network, Side::Left), SOURCE_PORT), (address(network, Side::Right), PORT)))
    }

    /// Frames put on the left's device that a socket on the right receives.
    fn injected(&self, ip: Ip, frame: Vec<u8>) -> Send<'_> {
        let wire = self.lab.left(|| Wire::open(DEVICE));
        let right = self.lab.right(|| udp_port((Side::Right.address(ip), PORT).into()));
        Box::new(move || {
            wire.send(&frame);
            received(&right, PAYLOAD);
        })
    }

    /// An established connection, to [`PORT`].
    fn connection(&self, ip: Ip) -> (TcpStream, TcpStream) {
        let (client, server) = self.lab.tcp_pair_to(ip, PORT);
        // So that nothing is said any more when it goes.
        set_option(&client, SOL_SOCKET, SO_LINGER, &[1_u32, 0].map(u32::to_ne_bytes).concat());
        (client, server)
    }
}

/// The address of a host in a network.
pub fn address(network: u8, side: Side) -> Ipv4Addr {
    Ipv4Addr::new(10, network, 0, side as u8)
}

/// Over the wire's.
const DEVICES: [&str; 5] = ["tagged", "service", "twice", "vxlan", "ipip"];

/// What makes a host's devices over the wire.
fn devices(side: Side) -> String {
    let (local, remote) = (address(WIRE, side), address(WIRE, side.other()));
    let mut batch = format!(
        "link add link {DEVICE} name tagged type vlan id {VLAN}\n\
         link add link {DEVICE} name service type vlan proto 802.1ad id {SERVICE_VLAN}\n\
         link add link service name twice type vlan id {VLAN}\n\
         link add vxlan type vxlan id 42 local {local} remote {remote} dstport 4789 dev {DEVICE}\n\
         link set vxlan address 02:77:00:00:02:0{}\n\
         link add ipip type ipip local {local} remote {remote}\n",
        side as u8
    );
    // A device over another comes up with it: before any does, all must know that they have nothing to say.
    for device in DEVICES {
        batch += &format!("link set {device} arp off multicast off addrgenmode none\n");
    }
    for device in DEVICES {
        batch += &format!("link set {device} up\n");
    }
    let [hardware, _] = side.other().hardware();
    let neighbours = [
        ("tagged", TAGGED, Some(hardware.clone())),
        ("twice", TWICE_TAGGED, Some(hardware)),
        ("vxlan", IN_VXLAN, Some(format!("02:77:00:00:02:0{}", side.other() as u8))),
        ("ipip", IN_IPIP, None),
    ];
    for (device, network, hardware) in neighbours {
        let (local, remote) = (address(network, side), address(network, side.other()));
        batch += &format!("address add {local} peer {remote} dev {device}\n");
        if let Some(hardware) = hardware {
            batch += &format!("neigh add {remote} lladdr {hardware} nud permanent dev {device}\n");
        }
    }
    batch
}

fn sending<'a>((left, right): (UdpSocket, UdpSocket)) -> Send<'a> {
    Box::new(move || {
        left.send(PAYLOAD).expect("sent");
        received(&right, PAYLOAD);
    })
}

#[track_caller]
fn received(socket: &UdpSocket, payload: &[u8]) {
    let mut buffer = vec![0; payload.len() + 1];
    let len = socket.recv(&mut buffer).unwrap_or_else(|error| panic!("receiving: {error}"));
    assert!(buffer[..len] == *payload, "another datagram of {len} bytes");
}

fn left_v4() -> SocketAddr {
    (Side::Left.address(Ip::V4), SOURCE_PORT).into()
}

fn right_v4() -> SocketAddr {
    (Side::Right.address(Ip::V4), PORT).into()
}

fn left_v6() -> SocketAddr {
    (Side::Left.address(Ip::V6), SOURCE_PORT).into()
}

fn right_v6() -> SocketAddr {
    (Side::Right.address(Ip::V6), PORT).into()
}

/// What every fragment begins with, wherever it is cut: a UDP header from [`SOURCE_PORT`] to [`PORT`].
fn deceptive() -> Vec<u8> {
    [SOURCE_PORT, PORT, 16, 0].map(u16::to_be_bytes).concat().repeat(500)
}

/// Datagrams of three fragments.
fn fragments(hosts: &Hosts, ip: Ip, port: u16) -> Send<'_> {
    let (from, to) = (Side::Left.address(ip), Side::Right.address(ip));
    let (left, right) = hosts.datagrams((from, SOURCE_PORT), (to, port));
    let payload = deceptive();
    Box::new(move || {
        left.send(&payload).expect("sent");
        received(&right, &payload);
    })
}

fn tcp_message(hosts: &Hosts, ip: Ip) -> Send<'_> {
    let (mut client, mut server) = hosts.connection(ip);
    Box::new(move || {
        client.write_all(PAYLOAD).expect("sent");
        let mut buffer = [0; PAYLOAD.len()];
        server.read_exact(&mut buffer).expect("received");
        assert_eq!(buffer, *PAYLOAD);
    })
}

/// Connections that are reset as soon as they are established.
fn connects(hosts: &Hosts, port: u16) -> Send<'_> {
    let to = SocketAddrV4::new(address(WIRE, Side::Right), port);
    let listener = hosts.lab.right(|| TcpListener::bind(to).expect("a free port"));
    listener.set_nonblocking(true).expect("it is a socket");
    Box::new(move || {
        let from = SocketAddrV4::new(address(WIRE, Side::Left), CLIENT_PORT);
        let client = hosts.lab.left(|| connect_from(from, to));
        let mut server = accept(&listener);
        drop(client);
        let reset = server.read(&mut [0; 1]).expect_err("nothing was sent");
        assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
    })
}

fn pinging(hosts: &Hosts, ip: Ip) -> Send<'_> {
    let to = Side::Right.address(ip);
    Box::new(move || drop(hosts.lab.left(|| run(&format!("ping -n -c 1 {to}")))))
}

fn extended<'a>(hosts: &'a Hosts, headers: &[u8]) -> Send<'a> {
    hosts.injected(Ip::V6, frame(&[], IPV6, &packet_v6(headers)))
}

fn tagged<'a>(hosts: &'a Hosts, network: u8, tags: &[(u16, u16)]) -> Send<'a> {
    let (from, to) = (address(network, Side::Left), address(network, Side::Right));
    let wire = hosts.lab.left(|| Wire::open(DEVICE));
    let right = hosts.lab.right(|| udp_port((to, PORT).into()));
    let frame = frame(tags, IPV4, &packet_v4(from, to));
    Box::new(move || {
        wire.send(&frame);
        received(&right, PAYLOAD);
    })
}

/// A message that is four segments, but leaves TCP as one: not more than half of what a new connection may send.
const SUPER: usize = 4 * 1_448;
/// Datagrams that are sent as one, and how many.
const SEGMENT: usize = 1_000;
const SEGMENTS: usize = 5;
/// What is sent from pages.
const PAGED: usize = 1_000;

/// The same frame on both ends.
fn both(is: fn(&Frame) -> bool) -> Vec<Wanted> {
    vec![(Place::Sent, 1, is), (Place::Received, 1, is)]
}

/// Whether devices get datagrams that are sent as one without having them cut before: Linux 5.10 doesn't do it.
fn sends_super_datagrams() -> bool {
    kernel_version() >= (5, 11)
}

/// Every kind, as this kernel has it.
pub fn kinds() -> Vec<Kind> {
    let super_datagrams = if sends_super_datagrams() { 1 } else { SEGMENTS };
    vec![
        Kind { name: "udp4", by: "send()", paged: 0, prepare: |hosts| hosts.over(WIRE), frames: both(is_udp4) },
        Kind {
            name: "udp6",
            by: "send()",
            paged: 0,
            prepare: |hosts| sending(hosts.datagrams(left_v6(), right_v6())),
            frames: both(is_udp6),
        },
        Kind {
            name: "udp4-unconnected",
            by: "sendto()",
            paged: 0,
            prepare: |hosts| {
                let (left, right) = hosts.unconnected(left_v4(), right_v4());
                Box::new(move || {
                    left.send_to(PAYLOAD, right_v4()).expect("sent");
                    received(&right, PAYLOAD);
                })
            },
            frames: both(is_udp4),
        },
        Kind {
            name: "udp6-unconnected",
            by: "sendto()",
            paged: 0,
            prepare: |hosts| {
                let (left, right) = hosts.unconnected(left_v6(), right_v6());
                Box::new(move || {
                    left.send_to(PAYLOAD, right_v6()).expect("sent");
                    received(&right, PAYLOAD);
                })
            },
            frames: both(is_udp6),
        },
        // IPv4 from a socket of IPv6.
        Kind {
            name: "udp4-mapped",
            by: "sendto()",
            paged: 0,
            prepare: |hosts| {
                let mapped = address(WIRE, Side::Right).to_ipv6_mapped();
                let (left, right) =
                    hosts.unconnected((Ipv6Addr::UNSPECIFIED, SOURCE_PORT), (Ipv6Addr::UNSPECIFIED, PORT));
                Box::new(move || {
                    left.send_to(PAYLOAD, (mapped, PORT)).expect("sent");
                    received(&right, PAYLOAD);
                })
            },
            frames: both(is_udp4),
        },
        Kind {
            name: "udp4-mapped-loopback",
            by: "send()",
            paged: 0,
            prepare: |hosts| {
                let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
                let bind = |port| hosts.lab.left(|| udp_port((mapped, port).into()));
                let (from, to) = (bind(SOURCE_PORT), bind(PORT));
                from.connect((mapped, PORT)).expect("loopback is up");
                sending((from, to))
            },
            frames: vec![(Place::Loopback, 1, is_udp4)],
        },
        Kind {
            name: "tcp4",
            by: "send() on a connection",
            paged: 1,
            prepare: |hosts| tcp_message(hosts, Ip::V4),
            frames: both(|frame| is_tcp4(frame, PAYLOAD.len())),
        },
        Kind {
            name: "tcp6",
            by: "send() on a connection",
            paged: 1,
            prepare: |hosts| tcp_message(hosts, Ip::V6),
            frames: both(|frame| is_tcp6(frame, PAYLOAD.len())),
        },
        Kind {
            name: "connect-443",
            by: "connect()",
            paged: 0,
            prepare: |hosts| connects(hosts, SERVER_PORT),
            frames: vec![
                (Place::Sent, 1, |frame| has_flags(frame, SERVER_PORT, SYN)),
                (Place::Sent, 1, |frame| has_flags(frame, SERVER_PORT, ACK)),
                (Place::Sent, 1, |frame| has_flags(frame, SERVER_PORT, RST | ACK)),
                (Place::Received, 3, |frame| whole_v4(frame, TCP).is_some_and(|s| ports(s, CLIENT_PORT, SERVER_PORT))),
            ],
        },
        Kind {
            name: "connect-47873",
            by: "connect()",
            paged: 0,
            prepare: |hosts| connects(hosts, SWAPPED_PORT),
            frames: vec![
                (Place::Sent, 1, |frame| has_flags(frame, SWAPPED_PORT, SYN)),
                (Place::Sent, 1, |frame| has_flags(frame, SWAPPED_PORT, ACK)),
                (Place::Sent, 1, |frame| has_flags(frame, SWAPPED_PORT, RST | ACK)),
                (Place::Received, 3, |frame| whole_v4(frame, TCP).is_some_and(|s| ports(s, CLIENT_PORT, SWAPPED_PORT))),
            ],
        },
        Kind {
            name: "icmp4",
            by: "ping",
            paged: 0,
            prepare: |hosts| pinging(hosts, Ip::V4),
            frames: both(|frame| whole_v4(frame, ICMP).is_some_and(|echo| echo[0] == 8)),
        },
        Kind {
            name: "icmp6",
            by: "ping",
            paged: 0,
            prepare: |hosts| pinging(hosts, Ip::V6),
            frames: both(|frame| in_v6(frame, &[], ICMP6).is_some_and(|echo| echo[0] == 128)),
        },
        // The tag beside the packet all the way.
        Kind {
            name: "vlan-offloaded",
            by: "send()",
            paged: 0,
            prepare: |hosts| hosts.over(TAGGED),
            frames: both(|frame| is_beside(frame, CTAGGED, is_udp4)),
        },
        // The tag beside the packet down to the queue, and in its bytes from where the device gets it.
        Kind {
            name: "vlan-inserted",
            by: "send()",
            paged: 0,
            prepare: |hosts| {
                let offload = Offloading::off(&hosts.lab);
                let mut send = hosts.over(TAGGED);
                Box::new(move || {
                    let _ = &offload;
                    send();
                })
            },
            frames: vec![
                (Place::Sent, 1, |frame| is_within(frame, (CTAG, VLAN), is_udp4)),
                (Place::Received, 1, |frame| is_beside(frame, CTAGGED, is_udp4)),
            ],
        },
        // The tag in the bytes all the way.
        Kind {
            name: "vlan-in-band",
            by: "send() of a packet socket",
            paged: 0,
            prepare: |hosts| tagged(hosts, TAGGED, &[(CTAG, VLAN)]),
            frames: vec![
                (Place::Sent, 1, |frame| is_within(frame, (CTAG, VLAN), is_udp4)),
                (Place::Received, 1, |frame| is_beside(frame, CTAGGED, is_udp4)),
            ],
        },
        // The outer tag beside the packet, the inner one in its bytes.
        Kind {
            name: "qinq-offloaded",
            by: "send()",
            paged: 0,
            prepare: |hosts| hosts.over(TWICE_TAGGED),
            frames: both(|frame| is_beside(frame, STAGGED, |frame| is_within(frame, (CTAG, VLAN), is_udp4))),
        },
        // Both in the bytes.
        Kind {
            name: "qinq-in-band",
            by: "send() of a packet socket",
            paged: 0,
            prepare: |hosts| tagged(hosts, TWICE_TAGGED, &[(STAG, SERVICE_VLAN), (CTAG, VLAN)]),
            frames: vec![
                (Place::Sent, 1, |frame| {
                    is_within(frame, (STAG, SERVICE_VLAN), |frame| is_within(frame, (CTAG, VLAN), is_udp4))
                }),
                (Place::Received, 1, |frame| {
                    is_beside(frame, STAGGED, |frame| is_within(frame, (CTAG, VLAN), is_udp4))
                }),
            ],
        },
        Kind {
            name: "udp6-hop-by-hop",
            by: "send() of a packet socket",
            paged: 0,
            prepare: |hosts| extended(hosts, &[HOP_BY_HOP]),
            frames: both(|frame| is_extended(frame, &[HOP_BY_HOP])),
        },
        // By a socket's option, so that sending functions meet it.
        Kind {
            name: "udp6-hop-by-hop-socket",
            by: "send() with IPV6_HOPOPTS",
            paged: 0,
            prepare: |hosts| {
                let (left, right) = hosts.datagrams(left_v6(), right_v6());
                set_option(&left, IPPROTO_IPV6, IPV6_HOPOPTS, &[0, 0, 1, 4, 0, 0, 0, 0]);
                sending((left, right))
            },
            frames: both(|frame| is_extended(frame, &[HOP_BY_HOP])),
        },
        Kind {
            name: "udp6-destination",
            by: "send() of a packet socket",
            paged: 0,
            prepare: |hosts| extended(hosts, &[DESTINATION]),
            frames: both(|frame| is_extended(frame, &[DESTINATION])),
        },
        Kind {
            name: "udp6-routing",
            by: "send() of a packet socket",
            paged: 0,
            prepare: |hosts| extended(hosts, &[ROUTING]),
            frames: both(|frame| is_extended(frame, &[ROUTING])),
        },
        // A fragment that is all there is.
        Kind {
            name: "udp6-atomic-fragment",
            by: "send() of a packet socket",
            paged: 0,
            prepare: |hosts| extended(hosts, &[FRAGMENT]),
            frames: both(|frame| is_extended(frame, &[FRAGMENT])),
        },
        Kind {
            name: "udp6-all-headers",
            by: "send() of a packet socket",
            paged: 0,
            prepare: |hosts| extended(hosts, ALL_HEADERS),
            frames: both(|frame| is_extended(frame, ALL_HEADERS)),
        },
        Kind {
            name: "fragments4",
            by: "send()",
            paged: 0,
            prepare: |hosts| fragments(hosts, Ip::V4, PORT),
            frames: vec![
                (Place::Sent, 1, |frame| is_first4(frame, PORT)),
                (Place::Sent, 2, is_later4),
                (Place::Received, 1, |frame| is_first4(frame, PORT)),
                (Place::Received, 2, is_later4),
            ],
        },
        // Of which only what looks like a header is to PORT.
        Kind {
            name: "fragments4-other",
            by: "send()",
            paged: 0,
            prepare: |hosts| fragments(hosts, Ip::V4, OTHER_PORT),
            frames: vec![
                (Place::Sent, 1, |frame| is_first4(frame, OTHER_PORT)),
                (Place::Sent, 2, is_later4),
                (Place::Received, 1, |frame| is_first4(frame, OTHER_PORT)),
                (Place::Received, 2, is_later4),
            ],
        },
        Kind {
            name: "fragments6",
            by: "send()",
            paged: 0,
            prepare: |hosts| fragments(hosts, Ip::V6, PORT),
            frames: vec![
                (Place::Sent, 1, |frame| is_first6(frame, PORT)),
                (Place::Sent, 2, is_later6),
                (Place::Received, 1, |frame| is_first6(frame, PORT)),
                (Place::Received, 2, is_later6),
            ],
        },
        Kind {
            name: "fragments6-other",
            by: "send()",
            paged: 0,
            prepare: |hosts| fragments(hosts, Ip::V6, OTHER_PORT),
            frames: vec![
                (Place::Sent, 1, |frame| is_first6(frame, OTHER_PORT)),
                (Place::Sent, 2, is_later6),
                (Place::Received, 1, |frame| is_first6(frame, OTHER_PORT)),
                (Place::Received, 2, is_later6),
            ],
        },
        // One packet larger than the wire allows, which a real device would cut; this one hands it over.
        Kind {
            name: "tcp4-gso",
            by: "send() on a connection",
            paged: 1,
            prepare: |hosts| {
                let (mut client, mut server) = hosts.connection(Ip::V4);
                Box::new(move || {
                    client.write_all(&[7; SUPER]).expect("sent");
                    server.read_exact(&mut [0; SUPER]).expect("received");
                })
            },
            frames: both(|frame| is_tcp4(frame, SUPER)),
        },
        // The same of datagrams.
        Kind {
            name: "udp4-gso",
            by: "send() with UDP_SEGMENT",
            paged: super_datagrams,
            prepare: |hosts| {
                let (left, right) = hosts.datagrams(left_v4(), right_v4());
                set_option(&left, SOL_UDP, UDP_SEGMENT, &(SEGMENT as u32).to_ne_bytes());
                Box::new(move || {
                    left.send(&[7; SEGMENTS * SEGMENT]).expect("sent");
                    (0..SEGMENTS).for_each(|_| received(&right, &[7; SEGMENT]));
                })
            },
            frames: vec![(Place::Sent, super_datagrams, is_udp_gso), (Place::Received, super_datagrams, is_udp_gso)],
        },
        Kind { name: "vxlan", by: "send()", paged: 0, prepare: |hosts| hosts.over(IN_VXLAN), frames: both(is_vxlan) },
        Kind { name: "ipip", by: "send()", paged: 0, prepare: |hosts| hosts.over(IN_IPIP), frames: both(is_ipip) },
        // What is behind the headers is in a file's page.
        Kind {
            name: "tcp4-sendfile",
            by: "sendfile()",
            paged: 1,
            prepare: |hosts| {
                let path = std::env::temp_dir().join("dwell-sendfile");
                std::fs::write(&path, [7; PAGED]).expect("there is room");
                let file = File::open(path).expect("just written");
                let (client, mut server) = hosts.connection(Ip::V4);
                Box::new(move || {
                    send_file(&client, &file, PAGED);
                    server.read_exact(&mut [0; PAGED]).expect("received");
                })
            },
            frames: both(|frame| is_tcp4(frame, PAGED)),
        },
        // In the sender's page, as far as the wire.
        Kind {
            name: "udp4-zerocopy",
            by: "send() with MSG_ZEROCOPY",
            paged: 1,
            prepare: |hosts| {
                let (left, right) = hosts.datagrams(left_v4(), right_v4());
                set_option(&left, SOL_SOCKET, SO_ZEROCOPY, &1_u32.to_ne_bytes());
                let payload = vec![7; PAGED];
                Box::new(move || {
                    send_uncopied(&left, &payload);
                    received(&right, &payload);
                    eventually("the pages are given back", || given_back(&left));
                })
            },
            frames: both(is_udp4),
        },
        // As many again between two other hosts, which have the same addresses.
        Kind {
            name: "udp4-twins",
            by: "send()",
            paged: 0,
            prepare: |hosts| {
                let twin = Hosts { lab: Lab::new() };
                let (left, right) = twin.datagrams(left_v4(), right_v4());
                let mut here = hosts.over(WIRE);
                Box::new(move || {
                    here();
                    left.send(b"twin").expect("sent");
                    received(&right, b"twin");
                    let _ = &twin;
                })
            },
            frames: both(is_udp4),
        },
    ]
}

const ALL_HEADERS: &[u8] = &[HOP_BY_HOP, DESTINATION, ROUTING, FRAGMENT];

/// A device on the left that has tags in the bytes; as it was when this goes.
#[derive(Debug)]
struct Offloading<'a>(&'a Lab);

impl<'a> Offloading<'a> {
    fn off(lab: &'a Lab) -> Self {
        lab.left(|| offload_tags(DEVICE, false));
        Self(lab)
    }
}

impl Drop for Offloading<'_> {
    fn drop(&mut self) {
        self.0.left(|| offload_tags(DEVICE, true));
    }
}
