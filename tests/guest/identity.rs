//! Whose packet it was: identities in events.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::MetadataExt as _;

use dwell::{Hook, Identity, LatencyEvent, LatencyProbe, Span};

use crate::lab::{Ip, Lab, Side};
use crate::support::{attach_paired, finish, pairings};

fn netns() -> u32 {
    std::fs::metadata("/proc/self/ns/net").unwrap().ino() as u32
}

fn identities(events: &[LatencyEvent], span: &str) -> Vec<Identity> {
    let of_span = events.iter().filter(|event| event.span == span);
    of_span.map(|event| event.identity.expect("every event has one")).collect()
}

/// Both ends of a datagram over loopback, IPv4 and IPv6: all that its headers, its socket and its interface tell.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn of_datagrams() {
    for (address, receive) in [("127.0.0.1", "ip_rcv"), ("::1", "ipv6_rcv")] {
        for pairing in pairings() {
            let ip: IpAddr = address.parse().unwrap();
            let (from, to) = (UdpSocket::bind((ip, 4_711)).unwrap(), UdpSocket::bind((ip, 5_000)).unwrap());
            from.connect((ip, 5_000)).unwrap();
            let send = if ip.is_ipv4() { "udp_sendmsg" } else { "udpv6_sendmsg" };
            let builder = LatencyProbe::builder().function(receive).function(send).identify();
            let probe = attach_paired(builder, *pairing);
            from.send(b"four").unwrap();
            to.recv(&mut [0; 8]).unwrap();
            let (events, ledger) = finish(probe);
            assert!(ledger.is_balanced(), "{ledger}");

            let [received] = identities(&events, receive)[..] else { panic!("{events:?}") };
            println!("{received:?}");
            assert_eq!((received.source(), received.destination()), (Some(ip), Some(ip)));
            assert_eq!((received.source_port(), received.destination_port()), (Some(4_711), Some(5_000)));
            assert_eq!(
                (received.protocol(), received.ip_version()),
                (Some(17), Some(if ip.is_ipv4() { 4 } else { 6 }))
            );
            assert_eq!((received.ttl(), received.dscp()), (Some(64), Some(0)));
            assert_eq!(received.len(), Some(if ip.is_ipv4() { 32 } else { 52 }));
            assert_eq!((received.interface(), received.received_on()), (Some(1), Some(1)));
            assert_eq!((received.netns(), received.mark(), received.vlan()), (Some(netns()), Some(0), None));
            assert_eq!((received.tcp_flags(), received.tcp_sequence()), (None, None));

            // There is no packet yet: what the socket knows.
            let [sent] = identities(&events, send)[..] else { panic!("{events:?}") };
            println!("{sent:?}");
            assert_eq!((sent.source(), sent.destination()), (Some(ip), Some(ip)));
            assert_eq!((sent.source_port(), sent.destination_port()), (Some(4_711), Some(5_000)));
            assert_eq!((sent.local_port(), sent.remote_port()), (Some(4_711), Some(5_000)));
            assert_eq!((sent.ttl(), sent.len(), sent.interface()), (None, None, None));
            assert_eq!((sent.netns(), sent.mark()), (Some(netns()), Some(0)));
            assert!(sent.cgroup().is_some_and(|id| id != 0), "{sent:?}");
        }
    }
}

/// A span between hooks has the identity of its start, with both ways to store it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn of_spans() {
    // The second finds no room in the table for most.
    for in_flight in [8_192, 1] {
        let span = Span::between(Hook::entry("ip_local_deliver"), Hook::entry("udp_rcv")).named("deliver");
        let builder = LatencyProbe::builder().span(span).function("udp_sendmsg").in_flight(in_flight).identify();
        let probe = builder.attach().unwrap();
        let (from, to) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        for n in 0..20 {
            from.send_to(&[n; 10], to.local_addr().unwrap()).unwrap();
            to.recv(&mut [0; 8]).unwrap();
        }
        let (events, ledger) = finish(probe);
        assert!(ledger.is_balanced(), "{ledger}");
        let delivered = identities(&events, "deliver");
        assert_eq!(delivered.len(), 20);
        for identity in delivered {
            assert_eq!(identity.source_port(), Some(from.local_addr().unwrap().port()));
            assert_eq!(identity.destination_port(), Some(to.local_addr().unwrap().port()));
        }
        // Without a peer a socket doesn't know where a datagram goes, but where it comes from.
        for identity in identities(&events, "udp_sendmsg") {
            assert_eq!(identity.local_port(), Some(from.local_addr().unwrap().port()));
            assert_eq!((identity.source(), identity.destination_port()), (None, None));
            assert_eq!((identity.protocol(), identity.ip_version()), (Some(17), Some(4)));
        }
    }
}

/// Port 443 is not 47873, which it is in the other order of bytes; TCP's flags, and what a socket gives its packets.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn of_connections() {
    let listeners = [443, 47_873].map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
    let probe = LatencyProbe::builder().function("tcp_v4_rcv").function("tcp_sendmsg").identify().attach().unwrap();
    let mut own = Vec::new();
    for listener in &listeners {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(b"hello").unwrap();
        server.read_exact(&mut [0; 5]).unwrap();
        own.push(client.local_addr().unwrap().port());
    }
    let (events, _) = finish(probe);
    for (port, own) in [443, 47_873].into_iter().zip(own) {
        let to_server = identities(&events, "tcp_v4_rcv").into_iter().filter(|id| id.destination_port() == Some(port));
        let to_server: Vec<Identity> = to_server.collect();
        assert!(to_server.len() >= 3, "{events:?}");
        assert!(to_server.iter().all(|identity| identity.source_port() == Some(own)));
        assert_eq!(to_server[0].tcp_flags().map(|flags| flags & 0x3f), Some(2), "first comes a SYN");
        assert!(to_server.iter().all(|identity| identity.tcp_sequence().is_some()));
        let sent = identities(&events, "tcp_sendmsg").into_iter().filter(|id| id.remote_port() == Some(port));
        assert_eq!(sent.map(|identity| identity.local_port()).collect::<Vec<_>>(), [Some(own)]);
    }
}

/// An IPv4 address within IPv6 is shown as IPv4.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn of_mapped_addresses() {
    let to = UdpSocket::bind("127.0.0.1:0").unwrap();
    let from = UdpSocket::bind("[::]:0").unwrap();
    from.connect(format!("[::ffff:127.0.0.1]:{}", to.local_addr().unwrap().port())).unwrap();
    let probe = LatencyProbe::builder().function("udpv6_sendmsg").function("ip_rcv").identify().attach().unwrap();
    from.send(b"x").unwrap();
    let (events, _) = finish(probe);
    for span in ["udpv6_sendmsg", "ip_rcv"] {
        let [identity] = identities(&events, span)[..] else { panic!("{events:?}") };
        assert_eq!(identity.destination(), Some("127.0.0.1".parse().unwrap()), "{span} {identity:?}");
        assert_eq!((identity.ip_version(), identity.source()), (Some(4), Some("127.0.0.1".parse().unwrap())));
    }
}

/// Two network namespaces with the same addresses are told apart.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn of_namespaces() {
    let lab = Lab::new();
    let probe = LatencyProbe::builder().function("ip_rcv").identify().attach().unwrap();
    let mut inodes = Vec::new();
    for side in [Side::Left, Side::Right] {
        inodes.push(lab.on(side, || {
            let socket = UdpSocket::bind("127.0.0.1:7777").unwrap();
            socket.send_to(b"x", "127.0.0.1:7777").unwrap();
            socket.recv(&mut [0; 8]).unwrap();
            std::fs::metadata("/proc/thread-self/ns/net").unwrap().ino() as u32
        }));
    }
    let (events, _) = finish(probe);
    let own = identities(&events, "ip_rcv").into_iter().filter(|identity| identity.destination_port() == Some(7_777));
    assert_eq!(own.map(|identity| identity.netns()).collect::<Vec<_>>(), [Some(inodes[0]), Some(inodes[1])]);
    assert_ne!(inodes[0], inodes[1]);
}

/// Through a veth a packet keeps the sender's socket for a while, which isn't the receiver's: namespace, ports and all
/// else are those of where it is.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn of_packets_that_cross() {
    let lab = Lab::new();
    let inodes = [Side::Left, Side::Right]
        .map(|side| lab.on(side, || std::fs::metadata("/proc/thread-self/ns/net").unwrap().ino() as u32));
    let (client, server) = lab.udp_pair(Ip::V4);
    let ports = [&client, &server].map(|socket| socket.local_addr().unwrap().port());
    let builder = LatencyProbe::builder().function("ip_rcv").function("ip_output").identify();
    let probe = builder.filter(format!("udp port {}", ports[1]).parse().unwrap()).attach().unwrap();
    client.send(b"x").unwrap();
    server.recv(&mut [0; 8]).unwrap();
    let (events, _) = finish(probe);
    let [received] = identities(&events, "ip_rcv")[..] else { panic!("{events:?}") };
    assert_eq!((received.netns(), received.socket_cookie(), received.cgroup()), (Some(inodes[1]), None, None));
    assert_eq!((received.local_port(), received.remote_port()), (Some(ports[1]), Some(ports[0])));
    let [sent] = identities(&events, "ip_output")[..] else { panic!("{events:?}") };
    assert_eq!((sent.netns(), sent.received_on()), (Some(inodes[0]), None));
    assert_eq!((sent.local_port(), sent.remote_port()), (Some(ports[0]), Some(ports[1])));
}
