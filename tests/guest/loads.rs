//! The kernel's verifier takes every program, however it is specialised, and each measures. `scripts/test` runs this also
//! with the programs compiled by the newest clang: what one compiler's code passes another's may not.

use std::net::Ipv4Addr;
use std::time::Duration;

use dwell::{Events, Filter, GroupBy, Hook, Key, LatencyProbe, LatencyProbeBuilder, Pairing, Protocol, Span};

use crate::support::{attach_paired, eventually, finish, ms, pairings, ping_pong, udp_to_itself};

const DATAGRAMS: usize = 5;

/// Something that a probe can be asked for.
type Wish = fn(LatencyProbeBuilder) -> LatencyProbeBuilder;

/// What there are leaner programs for, and last everything together, which has the most to be looked through.
const WISHES: [(&str, Wish); 4] = [
    ("no events", |builder| builder.events(Events::None)),
    ("all events", |builder| builder.events(Events::All)),
    ("slow events", |builder| builder.min_latency(Duration::from_nanos(1))),
    (TOGETHER, |builder| {
        let builder = builder.identify().stories().inner_headers().keep_slowest(64);
        builder.filter(udp()).events(Events::OneIn(2)).max_age(ms(60_000))
    }),
];
const TOGETHER: &str = "all together";

fn udp() -> Filter {
    Filter::protocol(Protocol::UDP) & Filter::host(Ipv4Addr::LOCALHOST)
}

/// By a pcap expression; without libpcap, by something else that only packets tell.
fn compiled() -> Filter {
    #[cfg(feature = "pcap")]
    return Filter::pcap("ip[0] & 0xf = 5 and ip[2:2] - (ip[0] & 0xf) * 4 = udp[4:2]").unwrap();
    #[cfg(not(feature = "pcap"))]
    Filter::length(1..)
}

/// The programs of these spans: of the first with each wish, of all of them with everything together.
fn check(spans: &[Span], attach: impl Fn(LatencyProbeBuilder) -> LatencyProbe) {
    for (name, wish) in WISHES {
        let spans = if name == TOGETHER { spans } else { &spans[..1] };
        let builder = spans.iter().cloned().fold(LatencyProbe::builder(), LatencyProbeBuilder::span);
        measures(name, attach(wish(builder)));
    }
}

/// Each span has seen each datagram.
#[track_caller]
fn measures(what: &str, probe: LatencyProbe) {
    ping_pong(&udp_to_itself(), DATAGRAMS, b"datagram");
    eventually(what, || probe.ledger().spans.iter().all(|account| account.completed >= DATAGRAMS as u64));
    finish(probe);
}

/// Calls, by sessions and by frames: of functions whose first argument is a packet or a socket, and grouped.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn calls() {
    let grouped = |by: GroupBy| Span::function("ip_rcv").grouped_by(by).named(by.to_string());
    let spans = [
        Span::function("ip_rcv"),
        Span::function("udp_sendmsg"),
        Span::function("ip_rcv").named("pcap").filter(compiled()),
        grouped(GroupBy::Interface),
        grouped(GroupBy::LocalPort),
    ];
    for &pairing in pairings() {
        check(&spans, |builder| attach_paired(builder, pairing));
    }
}

/// Functions and tracepoints by every kind of key; with what a packet's life takes, more than one object has programs for.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn between_hooks() {
    let socket = Span::between(Hook::entry("udp_sendmsg"), Hook::exit("udp_recvmsg"));
    let packet = Span::between(Hook::tracepoint("net_dev_queue"), Hook::entry("ip_rcv"));
    let by = |span: &Span, key: Key| span.clone().keyed_by(key).named(key.to_string());
    let spans = [
        by(&socket, Key::Sock),
        by(&packet, Key::Skb).with_abandoned().grouped_by(GroupBy::Protocol),
        by(&packet, Key::Skb).named("pcap").filter(compiled()),
        by(&packet, Key::SkbHead),
        by(&packet, Key::Flow),
        by(&socket, Key::Thread),
    ];
    check(&spans, |builder| attach_paired(builder, Pairing::Key));
}

/// Tracepoints whose arguments the programs can follow, and such as give them plain addresses.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn at_tracepoints() {
    let span = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
    let attach = |builder: LatencyProbeBuilder| attach_paired(builder, Pairing::Key);
    measures("typed", attach(LatencyProbe::builder().span(span.clone().keyed_by(Key::Flow)).identify()));
    for key in [Key::Skb, Key::Thread] {
        for events in [Events::None, Events::All] {
            let builder = LatencyProbe::builder().span(span.clone().keyed_by(key)).keep_slowest(3).events(events);
            measures("plain", attach(builder.plain_tracepoints()));
        }
    }
}
