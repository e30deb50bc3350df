//! Filters by pcap expressions: what libpcap compiled, run by the kernel's programs.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};

use dwell::{ErrorKind, Events, Filter, Hook, LatencyProbe, LatencyProbeBuilder, Protocol, Span};

use crate::support::{attach_paired, finish, only, pairings};

fn pcap(expression: &str) -> Filter {
    Filter::pcap(expression).unwrap_or_else(|error| panic!("{error}"))
}

/// A datagram of so many bytes to a port, and its arrival.
fn send(address: &str, port: u16, bytes: usize) {
    let to = UdpSocket::bind((address, port)).unwrap();
    let from = UdpSocket::bind((address, 0)).unwrap();
    from.send_to(&vec![0; bytes], (address, port)).unwrap();
    assert_eq!(to.recv(&mut [0; 2048]).unwrap(), bytes);
}

/// What goes through ip_rcv and ipv6_rcv: two datagrams each, and a connection over IPv4.
fn traffic() {
    for address in ["127.0.0.1", "::1"] {
        send(address, 5000, 10);
        send(address, 5001, 300);
    }
    let listener = TcpListener::bind("127.0.0.1:443").unwrap();
    let mut client = TcpStream::connect("127.0.0.1:443").unwrap();
    let mut server = listener.accept().unwrap().0;
    client.write_all(b"question").unwrap();
    server.read_exact(&mut [0; 8]).unwrap();
    server.write_all(b"answer").unwrap();
    client.read_exact(&mut [0; 6]).unwrap();
}

fn call(function: &str, name: &str, filter: Filter) -> Span {
    Span::function(function).named(name).filter(filter)
}

/// How many of the traffic each of these measures, and of how many it couldn't tell.
fn made(spans: impl IntoIterator<Item = Span>) -> Vec<[u64; 2]> {
    let builder = spans.into_iter().fold(LatencyProbe::builder(), LatencyProbeBuilder::span);
    let probe = builder.events(Events::None).attach().unwrap_or_else(|error| panic!("{error}"));
    traffic();
    let (_, ledger) = finish(probe);
    for span in &ledger.spans {
        assert_eq!((span.open, span.unmatched, span.started), (0, 0, span.completed), "{ledger}");
    }
    ledger.spans.iter().map(|span| [span.started, span.unparsed]).collect()
}

/// What an expression passes is what it means.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_expression() {
    let cases = [
        ("ip_rcv", "udp dst port 5000", 1),
        ("ip_rcv", "tcp[tcpflags] & (tcp-syn|tcp-ack) == tcp-syn and dst host 127.0.0.1", 1),
        // 20 bytes of IP, 8 of UDP.
        ("ip_rcv", "udp and len == 328", 1),
        ("ip_rcv", "ip[0] & 0xf = 5 and udp[0] << 8 | udp[1] > 0 and ip[2:2] - (ip[0] & 0xf) * 4 = udp[4:2]", 2),
        // Of everything that it can calculate something.
        ("ip_rcv", "udp and ((ip[9] ^ 1) * 2) % 7 == 4 and ip[9] << 1 >> 1 == 17 and -1 + ip[9] >= 16", 2),
        ("ip_rcv", "udp and ip[9] << (ip[9] + 15) == 0 and (ip[9] | 0x20) & 0x31 > 48", 2),
        // Division by zero, and what lies beyond the packet, aren't errors but a no.
        ("ip_rcv", "udp and ip[0] / (ip[9] - 17) = 0", 0),
        ("ip_rcv", "udp and ip[60] = 0", 1),
        ("ipv6_rcv", "ip6 and udp dst port 5000", 1),
    ];
    let made = made(cases.map(|(function, expression, _)| call(function, expression, pcap(expression))));
    for ((function, expression, expected), made) in cases.into_iter().zip(made) {
        assert_eq!(made, [expected, 0], "{function}: {expression}");
    }
}

/// Put together with other tests, also where it can't be told: there are no headers yet, or what was written to a
/// connection lies outside the linear part.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn with_others() {
    let syn = || pcap("tcp[tcpflags] & tcp-syn != 0");
    let question = || pcap("tcp[(tcp[12] & 0xf0) >> 2] = 0x71");
    let tcp = || Filter::protocol(Protocol::TCP);
    let made = made([
        call("ip_rcv", "and", syn() & Filter::destination_port(443)),
        call("ip_rcv", "or", syn() | Filter::destination_port(5000)),
        call("ip_rcv", "not", !pcap("tcp or port 5000") & Filter::ipv4()),
        call("__tcp_transmit_skb", "no headers", pcap("tcp")),
        call("ip_rcv", "tcp", tcp()),
        call("ip_rcv", "question", question()),
        call("ip_rcv", "not a question", !question() & tcp()),
        call("ip_rcv", "a question or not", question() | tcp()),
    ]);
    assert_eq!(made[..3], [[1, 0], [3, 0], [1, 0]]);
    // How many packets a connection takes isn't given.
    let [[0, sent], [all, 0], [0, unknown], [others, the_same], either] = made[3..] else { panic!("{made:?}") };
    assert!(sent >= 4 && unknown >= 2 && the_same == unknown && others + unknown == all, "{made:?}");
    assert_eq!(either, [all, 0], "{made:?}");
}

/// By every pairing, with events that tell whose packets they are about.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn with_identities() {
    for pairing in pairings() {
        let builder = LatencyProbe::builder().function("ip_rcv").filter(pcap("tcp port 443 and host 127.0.0.1"));
        let probe = attach_paired(builder.identify(), *pairing);
        traffic();
        let (events, ledger) = finish(probe);
        // How many packets a connection takes isn't given, but whose they are.
        assert!(events.len() >= 4 && events.len() as u64 == only(&ledger).started, "{pairing:?}: {ledger}");
        for event in &events {
            let identity = event.identity.unwrap();
            let ports = [identity.source_port(), identity.destination_port()];
            assert!(identity.protocol() == Some(Protocol::TCP.0) && ports.contains(&Some(443)), "{event:?}");
        }
    }
}

/// Spans between functions and between tracepoints. Wherever the kernel is in the packet, it is counted from the IP header
/// on: the one tracepoint is at Ethernet's.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn between_hooks() {
    let deliver = Span::between(Hook::entry("ip_local_deliver"), Hook::entry("udp_rcv")).named("deliver");
    let device = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
    let made = made([
        deliver.filter(pcap("udp and greater 300")),
        device.filter(pcap("udp and (len == 328 or ip6[4:2] = 18)") & !Filter::destination_port(5002)),
    ]);
    assert_eq!(made, [[1, 0], [2, 0]]);
}

/// As long and as branched as there is room for is still loaded, with as many other tests and all else that is found out,
/// and passes its packet at the end.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn as_long_as_can_be() {
    let ports = |count: u16| (0..count).map(|n| format!("dst port {}", 4900 - 2 * n)).collect::<Vec<_>>().join(" or ");
    let expression = |count| Filter::pcap(format!("{} or dst port 5000", ports(count)));
    let longest = (1..=60).rev().find_map(|count| expression(count).ok()).unwrap();
    assert!(longest.to_string().len() > 500, "{longest}");
    let others: Filter = ports(30).parse().unwrap();
    let builder = LatencyProbe::builder().function("ip_rcv").filter(others | longest).identify();
    let probe = builder.inner_headers().keep_slowest(4).frames().attach().unwrap();
    traffic();
    let (events, ledger) = finish(probe);
    assert_eq!(events.len(), 1, "{ledger}");
    assert_eq!(events[0].identity.unwrap().destination_port(), Some(5000));
}

/// Where there is no packet the error says so; and one expression is all that a span has, its probe's included.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn refused() {
    let error = LatencyProbe::builder().function("tcp_sendmsg").filter(pcap("tcp")).attach().unwrap_err().to_string();
    assert!(error.starts_with("`tcp_sendmsg` can't be filtered by pcap expression: it has no argument"), "{error}");
    let span = Span::function("ip_rcv").filter(pcap("udp"));
    let error = LatencyProbe::builder().span(span).filter(pcap("ip")).attach().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PcapTwice { .. }), "{error}");
}
