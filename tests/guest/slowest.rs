//! The slowest spans, which the kernel keeps until somebody asks.

use std::cmp::Reverse;
use std::net::UdpSocket;
use std::thread;
use std::time::Duration;

use dwell::{
    ErrorKind, Events, Hook, LatencyEvent, LatencyProbe, LatencyProbeBuilder, MonotonicTime, Outcome, Slowest, Span,
    SpanLedger,
};

use crate::histograms::has_reader_and_ring;
use crate::support::{attach_paired, eventually, finish, gettid, ms, pairings, ping_pong, udp_to_itself, would_block};

/// One receive that blocks for at least so long; the thread that it did.
pub fn slow_receive(probe: &LatencyProbe, wait: Duration) -> u32 {
    let socket = udp_to_itself();
    let open = |probe: &LatencyProbe| probe.ledger().get("udp_recvmsg").expect("the span").open;
    thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            socket.recv(&mut [0; 8]).expect("the datagram");
            gettid()
        });
        eventually("it waits", || open(probe) == 1);
        thread::sleep(wait);
        socket.send(b"go").unwrap();
        receiver.join().unwrap()
    })
}

fn latencies(events: &[LatencyEvent]) -> Vec<Duration> {
    events.iter().map(|event| event.latency).collect()
}

/// What was kept is the longest of what was seen, to the last field. Where several take equally long, any of them may have
/// been kept.
#[track_caller]
fn assert_slowest_of(seen: &[LatencyEvent], kept: &[LatencyEvent], count: usize) {
    let mut all = latencies(seen);
    all.sort_by_key(|&latency| Reverse(latency));
    all.truncate(count);
    assert_eq!(latencies(kept), all, "{kept:?}");
    for event in kept {
        assert!(seen.contains(event), "nobody saw {event:?}");
    }
    assert!(kept.iter().enumerate().all(|(n, event)| !kept[..n].contains(event)), "twice the same: {kept:?}");
}

/// Of a thousand quick calls and three slow ones the slow ones are kept, in their order, without a thread or a ring. Asked
/// again there is only what came since, and then nothing.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn the_slow_among_the_quick() {
    for &pairing in pairings() {
        let builder = LatencyProbe::builder().function("udp_recvmsg").events(Events::None).keep_slowest(2).identify();
        let probe = attach_paired(builder, pairing);
        assert_eq!(has_reader_and_ring(), (false, false));
        let socket = udp_to_itself();
        ping_pong(&socket, 500, b"x");
        let waits = [200, 600, 400].map(ms);
        let tids = waits.map(|wait| slow_receive(&probe, wait));
        ping_pong(&socket, 500, b"x");

        let slowest = probe.slowest("udp_recvmsg").unwrap();
        assert!(slowest.is_exact(), "{slowest:?}");
        let [first, second] = &slowest.events[..] else { panic!("{slowest:?}") };
        assert_eq!((first.tid, second.tid), (tids[1], tids[2]), "{slowest:?}");
        assert!(first.latency >= waits[1] && second.latency >= waits[2], "{slowest:?}");
        assert_eq!((first.ret, first.outcome), (Some(2), Outcome::Completed));
        assert_eq!(first.identity.and_then(|identity| identity.protocol()), Some(17), "{first:?}");
        assert_eq!(probe.histogram("udp_recvmsg").unwrap().max(), Some(first.latency));

        let asked = MonotonicTime::now();
        ping_pong(&socket, 10, b"x");
        let slowest = probe.slowest("udp_recvmsg").unwrap();
        assert_eq!(slowest.events.len(), 2);
        assert!(slowest.events.iter().all(|event| event.start >= asked), "{slowest:?}");
        assert_eq!(probe.slowest("udp_recvmsg").unwrap(), Slowest::default());
        // The bank of the first time begins anew.
        ping_pong(&socket, 1, b"x");
        let slowest = probe.slowest("udp_recvmsg").unwrap();
        assert!(slowest.events.len() == 1 && slowest.events[0].start >= asked, "{slowest:?}");
        let ledger = probe.stop();
        assert!(ledger.is_balanced() && ledger.spans[0].is_lossless(), "{ledger}");
    }
}

/// Traffic from four threads, each with a socket of its own.
fn traffic(datagrams: usize) {
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| ping_pong(&udp_to_itself(), datagrams, b"load"));
        }
    });
}

fn loaded(count: usize) -> LatencyProbeBuilder {
    let span = Span::between(Hook::entry("ip_local_deliver"), Hook::entry("udp_rcv")).named("deliver");
    let builder = LatencyProbe::builder().span(span).function("udp_sendmsg").function("ip_rcv").function("udp_recvmsg");
    builder.keep_slowest(count).channel_capacity(1 << 17).ring_bytes(16 << 20)
}

const SPANS: [&str; 4] = ["deliver", "udp_sendmsg", "ip_rcv", "udp_recvmsg"];

/// From several CPUs under load, of functions and of spans between hooks, what is kept is the longest of what the same
/// probe's events tell; and so it is of what came between two questions, asked at any time.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn of_all_that_was_seen() {
    for (n, &pairing) in pairings().iter().enumerate() {
        for (count, in_flight) in [(1, 8_192), (16, 1_000), (64, 8_192)] {
            let mut builder = loaded(count).in_flight(in_flight);
            if count == 16 {
                builder = builder.identify();
            }
            // Spans between hooks know but one way.
            let probe = if n == 0 { builder } else { builder.frames() }.attach().unwrap();
            assert_eq!(probe.spans()[1].pairing, pairing);
            let mut answers = SPANS.map(|_| Vec::new());
            let mut ask = || {
                for (span, answers) in SPANS.iter().zip(&mut answers) {
                    answers.push(probe.slowest(span).unwrap());
                }
            };
            traffic(500);
            ask();
            thread::scope(|scope| {
                let load = scope.spawn(|| traffic(1_000));
                while !load.is_finished() {
                    ask();
                    thread::sleep(ms(20));
                }
            });
            // A softirq may still be on its way out. Where ends are skipped their starts stay.
            let has_ended = |account: &SpanLedger| account.open == 0 || account.missed_exits > 0;
            eventually("all have ended", || probe.ledger().spans.iter().all(has_ended));
            ask();

            let (events, ledger) = finish(probe);
            for (span, answers) in SPANS.iter().zip(answers) {
                let account = ledger.get(span).unwrap();
                assert_eq!((account.ring_dropped, account.channel_dropped), (0, 0), "{ledger}");
                let seen: Vec<_> = events.iter().filter(|event| event.span == *span).cloned().collect();
                assert!(seen.len() >= 5_000, "{ledger}");
                let mut kept: Vec<_> = answers.iter().flat_map(|slowest| &slowest.events).cloned().collect();
                assert!(answers.len() > 2 && kept.len() >= count * 2, "{answers:?}");
                kept.sort_by_key(|event| Reverse(event.latency));
                let exact = answers.iter().filter(|slowest| slowest.is_exact()).count();
                println!("{span}: {} answers, {exact} of them exact; missed {}", answers.len(), account.missed);
                if exact == answers.len() && account.withheld == 0 {
                    kept.truncate(count);
                    assert_slowest_of(&seen, &kept, count);
                    continue;
                }
                // Whoever was interrupted, or skipped: it was nobody's fault else.
                let unkept: u64 = answers.iter().map(|slowest| slowest.unkept).sum();
                assert!(account.missed + account.missed_exits + unkept > 0, "{ledger}");
                // What is told is true all the same. Events are withheld sooner, or later.
                assert!(account.withheld > 0 || kept.iter().all(|event| seen.contains(event)), "{kept:?}");
            }
        }
    }
}

/// Each span has its own; two probes don't take from each other; and who hasn't asked for it is told how.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn two_probes() {
    let builder = || LatencyProbe::builder().function("udp_sendmsg").function("ip_rcv").events(Events::None);
    let (one, other) = (builder().keep_slowest(3).attach().unwrap(), builder().keep_slowest(64).attach().unwrap());
    let none = builder().attach().unwrap();
    ping_pong(&udp_to_itself(), 10, b"x");
    for _ in 0..2 {
        assert_eq!(one.slowest("udp_sendmsg").unwrap().events.len(), 3);
        ping_pong(&udp_to_itself(), 3, b"x");
    }
    let all = other.slowest("udp_sendmsg").unwrap();
    assert_eq!((all.events.len(), all.is_exact()), (16, true), "{all:?}");
    let packets = other.slowest("ip_rcv").unwrap();
    assert!(packets.events.iter().all(|event| event.span == "ip_rcv" && event.skb.unwrap().len == Some(29)));
    assert_eq!(packets.events.len(), 16);
    assert_eq!(one.slowest("ip_rcv").unwrap().events.len(), 3);

    let setting = |result: Result<Slowest, dwell::Error>| match result.expect_err("there are none").kind() {
        ErrorKind::Config { setting, .. } => *setting,
        other => panic!("{other:?}"),
    };
    assert_eq!(setting(none.slowest("ip_rcv")), "keep_slowest");
    assert_eq!(setting(one.slowest("no_such")), "span");
}

/// Packets that never reach the end aren't among them, and those that reach any of several ends are.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn only_what_was_completed() {
    let span = Span::between(Hook::tracepoint("netif_receive_skb"), Hook::entry("udp_queue_rcv_one_skb"));
    let span = span.or_to(Hook::entry("udpv6_queue_rcv_one_skb")).with_abandoned().named("received");
    let probe = LatencyProbe::builder().span(span).events(Events::None).keep_slowest(64).attach().unwrap();
    let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(b"hello", nobody).unwrap();
    ping_pong(&udp_to_itself(), 5, b"x");
    let v6 = UdpSocket::bind("[::1]:0").unwrap();
    v6.set_nonblocking(true).unwrap();
    for _ in 0..5 {
        v6.send_to(b"x", v6.local_addr().unwrap()).unwrap();
        eventually("it is there", || v6.recv(&mut [0; 8]).map_err(|error| assert!(would_block(&error))).is_ok());
    }
    let slowest = probe.slowest("received").unwrap();
    assert!(slowest.is_exact(), "{slowest:?}");
    assert!(slowest.events.iter().all(|event| event.outcome == Outcome::Completed));
    for (end, count) in [("udp_queue_rcv_one_skb", 5), ("udpv6_queue_rcv_one_skb", 5)] {
        assert_eq!(slowest.events.iter().filter(|event| event.ended_at == end).count(), count, "{slowest:?}");
    }
    let ledger = probe.stop();
    assert!(ledger.spans[0].abandoned > 0 && ledger.is_balanced(), "{ledger}");
}
