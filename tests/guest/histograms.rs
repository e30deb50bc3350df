//! What the kernel counts itself: histograms, groups of them, and which latencies become events.

use std::fs;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dwell::{
    ErrorKind, Events, GroupBy, GroupKey, Groups, Histogram, Hook, Key, LatencyEvent, LatencyProbe, Pairing,
    ProgramStatistics, Span, Stage,
};
use libbpf_rs::MapType;
use libbpf_rs::query::MapInfoIter;

use crate::lab::{DEVICE, Ip, Lab, loopback_tcp, loopback_udp, send_datagrams, tcp_messages};
use crate::support::{
    SetOnDrop, attach_paired, eventually, finish, gettid, ms, only, pairings, ping_pong, ping_pong_until, run,
    udp_to_itself, would_block,
};

/// Asks for histograms only.
fn silent(span: Span) -> LatencyProbe {
    LatencyProbe::builder().span(span).events(Events::None).attach().unwrap_or_else(|error| panic!("{error}"))
}

/// Whether this process has a thread that reads events, and whether it holds a ring buffer.
pub fn has_reader_and_ring() -> (bool, bool) {
    // What is gone by now isn't one.
    let any = |directory: &str, holds: &dyn Fn(PathBuf) -> bool| {
        let entries = fs::read_dir(directory).expect("/proc is mounted");
        entries.into_iter().any(|entry| holds(entry.expect("an entry").path()))
    };
    let reads = |path, text: &str| fs::read_to_string(path).is_ok_and(|read| read.contains(text));
    let reader = any("/proc/self/task", &|thread| reads(thread.join("comm"), "dwell-reader\n"));
    let ring_buffer = format!("map_type:\t{}\n", MapType::RingBuf as u32);
    let ring = any("/proc/self/fdinfo", &|descriptor| reads(descriptor, &ring_buffer));
    (reader, ring)
}

/// The names of all maps that the kernel has.
fn maps() -> Vec<String> {
    MapInfoIter::default().map(|map| map.name.to_string_lossy().into_owned()).collect()
}

/// 20,000 datagrams are 20,000 latencies, of which none is an event; for that there is no thread, and no ring.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn twenty_thousand_datagrams_and_no_events() {
    const COUNT: u64 = 20_000;
    assert_eq!(has_reader_and_ring(), (false, false), "another test's probe");
    let with_events = LatencyProbe::builder().function("ip_rcv").attach().unwrap();
    assert_eq!(has_reader_and_ring(), (true, true), "what the others mustn't have isn't recognised");
    drop(with_events);

    let probes: Vec<_> = pairings()
        .iter()
        .map(|&pairing| attach_paired(LatencyProbe::builder().function("ip_rcv").events(Events::None), pairing))
        .collect();
    assert_eq!(has_reader_and_ring(), (false, false));
    eventually("there is no ring", || !maps().iter().any(|name| name.starts_with("dwell_ring")));
    ping_pong(&udp_to_itself(), COUNT as usize, &[7; 32]);
    for probe in probes {
        let histogram = probe.histogram("ip_rcv").unwrap();
        assert_eq!(histogram.count(), COUNT, "{histogram:?}");
        assert!(histogram.min() > Some(Duration::ZERO) && histogram.mean() > histogram.min(), "{histogram:?}");
        assert!(histogram.quantile(0.5) >= histogram.min() && histogram.max() > histogram.mean(), "{histogram:?}");
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        assert_eq!((account.started, account.completed, account.unsampled), (COUNT, COUNT, COUNT), "{account}");
        assert_eq!((account.emitted, account.delivered, events.len()), (0, 0, 0), "{account}");
        assert!(account.is_lossless() && account.open == 0 && account.unmatched == 0, "{account}");
    }
}

/// Counted in user space, the events of a span make the same histogram.
#[track_caller]
fn assert_made_of(histogram: &Histogram, events: &[LatencyEvent], span: &str) {
    let made: Histogram = events.iter().filter(|event| event.span == span).map(|event| event.latency).collect();
    assert_eq!(histogram.count(), made.count(), "{span}");
    assert_eq!(histogram.sum(), made.sum(), "{span}");
    assert_eq!((histogram.min(), histogram.max()), (made.min(), made.max()), "{span}");
    assert!(histogram.buckets().eq(made.buckets()), "{span}:\n{histogram:#}\n{made:#}");
    assert_eq!(*histogram, made, "{span}");
}

/// The kernel counts what it hands over: count, sum, minimum, maximum and each bucket, of latencies from nanoseconds to a
/// good part of a second.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_histogram_is_what_its_events_say() {
    const SPANS: [&str; 4] = ["ip_rcv", "udp_recvmsg", "udp_sendmsg", "across"];
    for &pairing in pairings() {
        let across = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
        let builder = SPANS[..3].iter().fold(LatencyProbe::builder(), |builder, &name| builder.function(name));
        let builder = builder.span(across.named("across"));
        let probe = (if pairing == Pairing::Frame { builder.frames() } else { builder }).attach().unwrap();
        assert!(probe.spans()[..3].iter().all(|span| span.pairing == pairing));
        let socket = udp_to_itself();
        ping_pong(&socket, 2_000, b"x");
        for wait in [5, 50, 300] {
            socket.set_read_timeout(Some(ms(wait))).unwrap();
            assert!(would_block(&socket.recv(&mut [0; 8]).unwrap_err()));
        }
        eventually("all is delivered", || {
            probe.ledger().spans.iter().all(|account| account.delivered >= 2_000 && account.open == 0)
        });
        let histograms = SPANS.map(|span| probe.histogram(span).unwrap());
        let (events, ledger) = finish(probe);
        for (span, histogram) in SPANS.iter().zip(&histograms) {
            assert!(ledger.get(span).unwrap().is_lossless(), "{ledger}");
            assert_made_of(histogram, &events, span);
        }
        assert_eq!(histograms.map(|histogram| histogram.count()), [2_000, 2_003, 2_000, 2_000], "{ledger}");
    }
}

/// Only what takes as long becomes an event; the others are counted. Where a bucket begins at the threshold, the histogram
/// tells how many there are of each.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn only_what_is_over_the_threshold_is_an_event() {
    const COUNT: usize = 2_000;
    const WAITS: usize = 5;
    // 16.8 ms, where a bucket begins.
    let long = Duration::from_nanos(1 << 24);
    let functions = ["ip_rcv", "udp_recvmsg"];
    // With and without packets, and those that wait in between.
    let traffic = || {
        let socket = udp_to_itself();
        ping_pong(&socket, COUNT, b"x");
        socket.set_read_timeout(Some(ms(60))).unwrap();
        for _ in 0..WAITS {
            assert!(would_block(&socket.recv(&mut [0; 8]).unwrap_err()));
        }
    };
    for &pairing in pairings() {
        let builder = || functions.iter().fold(LatencyProbe::builder(), |builder, &name| builder.function(name));
        let first = attach_paired(builder().events(Events::OverThreshold(Duration::from_secs(3_600))), pairing);
        traffic();
        let buckets: Vec<_> = first.histogram("ip_rcv").unwrap().buckets().collect();
        let (events, ledger) = finish(first);
        assert!(events.is_empty() && ledger.spans.iter().all(|account| account.emitted == 0), "{ledger}");
        assert!(ledger.spans.iter().all(|account| account.below_threshold == account.completed), "{ledger}");

        // Of the packets about a half, if the machine is as fast as it was.
        let mut below = 0;
        let median = buckets.iter().find(|bucket| {
            below += bucket.count as usize;
            below > COUNT / 2
        });
        let median = median.expect("there are latencies").lower;
        let received = Span::function("ip_rcv").events(Events::OverThreshold(median));
        let builder = LatencyProbe::builder().min_latency(long).span(received).function("udp_recvmsg");
        let probe = attach_paired(builder, pairing);
        traffic();
        let histograms = functions.map(|function| probe.histogram(function).unwrap());
        let (events, ledger) = finish(probe);
        for ((function, histogram), threshold) in functions.iter().zip(&histograms).zip([median, long]) {
            let account = ledger.get(function).unwrap();
            let events: Vec<_> = events.iter().filter(|event| event.span == *function).collect();
            assert!(events.iter().all(|event| event.latency >= threshold), "{threshold:?}");
            assert_eq!((account.completed, account.emitted), (histogram.count(), events.len() as u64), "{account}");
            assert_eq!(account.below_threshold + account.emitted, account.completed, "{account}");
            let over = histogram.buckets().filter(|bucket| bucket.lower >= threshold).map(|bucket| bucket.count);
            assert_eq!(account.emitted, over.sum::<u64>(), "{threshold:?}: {account}");
            assert!(account.is_lossless(), "{ledger}");
        }
        let waited = ledger.get("udp_recvmsg").unwrap();
        assert!(waited.emitted >= WAITS as u64 && waited.below_threshold > COUNT as u64 / 2, "{ledger}");
        println!("{pairing:?}, {median:?}: {ledger}");
    }
}

/// One in ten is about a tenth, by chance; what isn't picked is in the histogram all the same.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn one_in_ten_is_a_tenth() {
    const COUNT: u64 = 10_000;
    let probes: Vec<_> = pairings()
        .iter()
        .map(|&pairing| attach_paired(LatencyProbe::builder().function("ip_rcv").events(Events::OneIn(10)), pairing))
        .collect();
    ping_pong(&udp_to_itself(), COUNT as usize, b"x");
    for probe in probes {
        assert_eq!(probe.histogram("ip_rcv").unwrap().count(), COUNT);
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        assert_eq!((account.completed, account.unsampled + account.emitted), (COUNT, COUNT), "{account}");
        assert_eq!(events.len() as u64, account.emitted, "{account}");
        assert!(account.is_lossless(), "{account}");
        // The standard deviation is the root of n * p * (1 - p): 30.
        assert!(account.emitted.abs_diff(COUNT / 10) < 5 * 30, "{account}");
    }
}

/// What a span says of its events goes before what the probe says.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_spans_own_wish_for_events_goes_first() {
    const COUNT: u64 = 200;
    let loud = Span::function("udp_sendmsg").events(Events::All);
    let builder = LatencyProbe::builder().events(Events::None).function("ip_rcv").span(loud);
    let probe = builder.attach().unwrap();
    let wishes: Vec<_> = probe.spans().iter().map(|span| span.events).collect();
    assert_eq!(wishes, [Events::None, Events::All]);
    assert_eq!(has_reader_and_ring(), (true, true));
    ping_pong(&udp_to_itself(), COUNT as usize, b"x");
    for span in ["ip_rcv", "udp_sendmsg"] {
        assert_eq!(probe.histogram(span).unwrap().count(), COUNT, "{span}");
    }
    let (events, ledger) = finish(probe);
    assert!(events.iter().all(|event| event.span == "udp_sendmsg"), "{ledger}");
    let [quiet, loud] = &ledger.spans[..] else { panic!("{ledger}") };
    assert_eq!((quiet.completed, quiet.emitted, quiet.unsampled), (COUNT, 0, COUNT), "{ledger}");
    assert_eq!((loud.completed, loud.emitted, loud.unsampled), (COUNT, COUNT, 0), "{ledger}");
    assert_eq!(events.len() as u64, COUNT, "{ledger}");
}

/// Takes snapshots until `done`, and compares each with the one before it: nothing ever gets less, and what came in
/// between adds up to all.
fn take_snapshots(probe: &LatencyProbe, done: &AtomicBool) -> (Histogram, usize) {
    let mut last = probe.histogram("ip_rcv").unwrap();
    let mut sum = last.clone();
    let mut taken = 0;
    while !done.load(Ordering::Relaxed) {
        let now = probe.histogram("ip_rcv").unwrap();
        let between = now.since(&last);
        assert_eq!(last.count() + between.count(), now.count(), "a count got less");
        assert!(now.sum() >= last.sum() && now.max() >= last.max(), "{now:?} after {last:?}");
        assert!(last.is_empty() || now.min() <= last.min(), "{now:?} after {last:?}");
        sum.merge(&between);
        last = now;
        taken += 1;
    }
    assert_eq!((sum.count(), sum.sum()), (last.count(), last.sum()), "{sum:?} {last:?}");
    assert!(sum.buckets().eq(last.buckets()));
    (last, taken)
}

/// Snapshots while the function is called without pause lose nothing, and neither do CPUs that go and come back.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn snapshots_under_load_lose_nothing() {
    const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";
    for &pairing in pairings() {
        let probe = attach_paired(LatencyProbe::builder().function("ip_rcv").events(Events::None), pairing);
        let (done, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let (last, taken) = thread::scope(|scope| {
            let stop = SetOnDrop(&done);
            ping_pong_until(scope, &done, &sent);
            let snapshots = scope.spawn(|| take_snapshots(&probe, &done));
            thread::sleep(ms(700));
            for online in ["0", "1"] {
                fs::write(ONLINE, online).unwrap_or_else(|error| panic!("{ONLINE}: {error}"));
                let so_far = sent.load(Ordering::Relaxed);
                eventually("calls go on", || sent.load(Ordering::Relaxed) > so_far + 200);
            }
            drop(stop);
            snapshots.join().unwrap()
        });
        let sent = sent.into_inner();
        let total = probe.histogram("ip_rcv").unwrap();
        println!("{pairing:?}: {sent} sent, {taken} snapshots");
        assert!(taken > 10, "{taken} snapshots");
        assert!(last.count() <= total.count(), "{last:?} {total:?}");
        let (_, ledger) = finish(probe);
        let account = only(&ledger);
        assert_eq!((account.started, total.count()), (sent, sent), "{account}");
        assert!(account.is_lossless() && account.open == 0, "{account}");
    }
}

/// The groups of a span, which together are its histogram.
#[track_caller]
fn groups(probe: &LatencyProbe, span: &str) -> Groups {
    let mut found = None;
    // What comes in between, such as a late acknowledgement, is in only one of both.
    eventually("nothing comes in between", || {
        let before = probe.histogram(span).unwrap();
        let groups = probe.groups(span).unwrap_or_else(|error| panic!("{error}"));
        let quiet = probe.histogram(span).unwrap() == before;
        assert!(!quiet || groups.total() == before, "{span}: {before:?} {groups:?}");
        found = quiet.then_some(groups);
        quiet
    });
    found.expect("it was quiet")
}

/// How many latencies each has.
fn counts(groups: &Groups) -> Vec<(GroupKey, u64)> {
    groups.groups.iter().map(|(key, histogram)| (*key, histogram.count())).collect()
}

/// Each CPU has its own.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn grouped_by_cpu() {
    for &pairing in pairings() {
        let span = Span::function("ip_rcv").grouped_by(GroupBy::Cpu);
        let probe = attach_paired(LatencyProbe::builder().span(span).events(Events::None), pairing);
        let socket = udp_to_itself();
        for (cpu, count) in [(0, 300), (1, 200)] {
            // Loopback hands a packet on where it was sent.
            run(&format!("taskset -p {} {}", 1 << cpu, gettid()));
            ping_pong(&socket, count, b"x");
        }
        run(&format!("taskset -p 3 {}", gettid()));
        let groups = groups(&probe, "ip_rcv");
        assert_eq!(counts(&groups), [(GroupKey::Cpu(0), 300), (GroupKey::Cpu(1), 200)], "{groups:?}");
        assert!(groups.rest.is_empty());
        assert!(only(&finish(probe).1).is_lossless());
    }
}

/// Loopback and a wire, of calls and of a span between hooks.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn grouped_by_interface() {
    let lab = Lab::new();
    let index = lab.right(|| run(&format!("ip -o link show dev {DEVICE}")));
    let index = index.split(':').next().and_then(|index| index.parse().ok()).expect("INDEX: NAME");
    for &pairing in pairings() {
        let call = Span::function("ip_rcv").grouped_by(GroupBy::Interface);
        let delivered = Span::between(Hook::tracepoint("netif_receive_skb"), Hook::entry("skb_consume_udp"));
        let delivered = delivered.named("delivered").grouped_by(GroupBy::Interface);
        let builder = LatencyProbe::builder().span(call).span(delivered).events(Events::None);
        let probe = (if pairing == Pairing::Frame { builder.frames() } else { builder }).attach().unwrap();
        let ((left, right), (here, there)) = (lab.udp_pair(Ip::V4), loopback_udp(Ip::V4));
        send_datagrams(&left, &right, 120, b"over the wire");
        send_datagrams(&here, &there, 230, b"over loopback");
        for span in ["ip_rcv", "delivered"] {
            let groups = groups(&probe, span);
            let expected = [(GroupKey::Interface(1), 230), (GroupKey::Interface(index), 120)];
            assert_eq!(counts(&groups), expected, "{span}: {groups:?}");
            assert!(groups.rest.is_empty(), "{span}: {groups:?}");
        }
        assert!(finish(probe).1.spans.iter().all(|account| account.is_lossless()));
    }
}

/// UDP and TCP side by side.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn grouped_by_protocol() {
    const TCP: GroupKey = GroupKey::Protocol(6);
    const UDP: GroupKey = GroupKey::Protocol(17);
    let (client, server) = loopback_tcp(Ip::V4);
    for &pairing in pairings() {
        let span = Span::function("ip_rcv").grouped_by(GroupBy::Protocol);
        // By socket, where there is no packet.
        let send = Span::function("sock_sendmsg").grouped_by(GroupBy::Protocol);
        let probe = attach_paired(LatencyProbe::builder().span(span).span(send).events(Events::None), pairing);
        tcp_messages(&client, &server, 100, b"a message");
        ping_pong(&udp_to_itself(), 150, b"x");
        // Acknowledgements may still be on their way.
        let received = groups(&probe, "ip_rcv");
        assert_eq!(received.groups.keys().collect::<Vec<_>>(), [&TCP, &UDP], "{received:?}");
        assert_eq!(received.groups[&UDP].count(), 150, "{received:?}");
        assert!(received.groups[&TCP].count() >= 200 && received.rest.is_empty(), "{received:?}");
        drop(probe);
    }
}

/// The ports of sockets, and, where a packet has no socket yet, the port that it is for.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn grouped_by_local_port() {
    for &pairing in pairings() {
        let spans = ["udp_sendmsg", "udp_recvmsg", "ip_rcv"];
        let builder = spans.iter().fold(LatencyProbe::builder().events(Events::None), |builder, &span| {
            builder.span(Span::function(span).grouped_by(GroupBy::LocalPort))
        });
        let probe = attach_paired(builder, pairing);
        let sockets = [(); 3].map(|()| udp_to_itself());
        let mut expected = Vec::new();
        for (socket, count) in sockets.iter().zip([10, 200, 50]) {
            ping_pong(socket, count, b"x");
            expected.push((GroupKey::LocalPort(socket.local_addr().unwrap().port()), count as u64));
        }
        expected.sort();
        for span in spans {
            let groups = groups(&probe, span);
            assert_eq!(counts(&groups), expected, "{span}: {groups:?}");
            assert!(groups.rest.is_empty(), "{span}: {groups:?}");
        }
        assert!(finish(probe).1.spans.iter().all(|account| account.is_lossless()));
    }
}

/// What finds no room is counted, together.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn groups_for_which_there_is_no_room_are_the_rest() {
    for &pairing in pairings() {
        let span = Span::function("udp_sendmsg").grouped_by(GroupBy::LocalPort).max_groups(1);
        let probe = attach_paired(LatencyProbe::builder().span(span).events(Events::None), pairing);
        let sockets = [(); 3].map(|()| udp_to_itself());
        for (socket, count) in sockets.iter().zip([10, 200, 50]) {
            ping_pong(socket, count, b"x");
        }
        let groups = groups(&probe, "udp_sendmsg");
        let first = GroupKey::LocalPort(sockets[0].local_addr().unwrap().port());
        assert_eq!(counts(&groups), [(first, 10)], "{pairing:?} {groups:?}");
        assert_eq!((groups.rest.count(), groups.total().count()), (250, 260), "{groups:?}");
        assert!(only(&finish(probe).1).is_lossless());
    }
}

/// What can't be grouped, isn't grouped, or isn't there, is an error that says so.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn there_is_no_group_without_packet_or_socket() {
    for by in [GroupBy::Interface, GroupBy::Protocol, GroupBy::LocalPort] {
        let builder = LatencyProbe::builder().span(Span::function("vfs_read").grouped_by(by)).events(Events::None);
        let error = builder.attach().expect_err("it has neither");
        assert!(matches!(error.kind(), ErrorKind::NoKey { hook, .. } if hook == "vfs_read"), "{by}: {error}");
    }
    // CPUs can always be told apart.
    let probe = silent(Span::function("vfs_read").grouped_by(GroupBy::Cpu));
    fs::read("/proc/self/stat").unwrap();
    assert!(groups(&probe, "vfs_read").total().count() > 0);
    drop(probe);

    let probe = silent(Span::function("ip_rcv"));
    let error = probe.groups("ip_rcv").expect_err("it has none");
    assert!(matches!(error.kind(), ErrorKind::Config { setting: "grouped_by", .. }), "{error}");
    for error in [probe.histogram("ip_output").map(drop), probe.groups("ip_output").map(drop)] {
        let error = error.expect_err("there is no such span");
        assert!(matches!(error.kind(), ErrorKind::Config { setting: "span", .. }), "{error}");
    }
}

/// The functions of a stage share one histogram.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn functions_of_a_stage_share_a_histogram() {
    for &pairing in pairings() {
        let probe = attach_paired(LatencyProbe::builder().stage(Stage::UdpReceive), pairing);
        assert_eq!(probe.spans()[0].starts, ["udp_rcv", "udpv6_rcv"]);
        let ((a, b), (c, d)) = (loopback_udp(Ip::V4), loopback_udp(Ip::V6));
        send_datagrams(&a, &b, 100, b"x");
        send_datagrams(&c, &d, 150, b"x");
        eventually("all is delivered", || only(&probe.ledger()).delivered == 250);
        let histogram = probe.histogram("udp-receive").unwrap();
        let (events, ledger) = finish(probe);
        assert_eq!(events.iter().filter(|event| event.ended_at == "udp_rcv").count(), 100, "{ledger}");
        assert_eq!(histogram.count(), 250, "{ledger}");
        assert_made_of(&histogram, &events, "udp-receive");
    }
}

/// What gets too old is in no histogram.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn expired_calls_are_in_no_histogram() {
    const AGE: Duration = Duration::from_millis(200);
    for &pairing in pairings() {
        for events in [Events::None, Events::All] {
            let span = Span::function("udp_recvmsg").max_age(AGE).events(events);
            let probe = attach_paired(LatencyProbe::builder().span(span), pairing);
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let waits = [20, 400, 20, 300, 20].map(|wait| {
                socket.set_read_timeout(Some(ms(wait))).unwrap();
                let before = Instant::now();
                assert!(would_block(&socket.recv(&mut [0; 8]).unwrap_err()));
                before.elapsed()
            });
            let histogram = probe.histogram("udp_recvmsg").unwrap();
            let (events, ledger) = finish(probe);
            let account = only(&ledger);
            assert_eq!((account.started, account.completed, account.expired), (5, 3, 2), "{account}");
            assert_eq!(histogram.count(), 3, "{account}");
            // Timers go by ticks, of which an emulated machine may catch up on some at once.
            let shortest = ms(20).min(*waits.iter().min().unwrap());
            assert!(histogram.min().unwrap() + ms(5) >= shortest && histogram.max() <= Some(AGE), "{histogram:?}");
            assert!(events.len() as u64 == account.delivered && account.delivered == account.emitted, "{account}");
        }
    }
}

/// Without events there is no thread that takes away what has expired: whoever reads does, and so makes room.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn reading_makes_room() {
    const ROOM: usize = 8;
    // Nobody connects by TCP, and a flow has no life that could end.
    let span = Span::between(Hook::entry("udp_sendmsg"), Hook::entry("tcp_v4_connect")).named("never");
    let span = span.keyed_by(Key::Flow).max_age(ms(200)).events(Events::None);
    let probe = LatencyProbe::builder().in_flight(ROOM).span(span).attach().unwrap();
    let sockets: Vec<_> = (0..2 * ROOM).map(|_| udp_to_itself()).collect();
    let send = |sockets: &[UdpSocket]| sockets.iter().for_each(|socket| assert_eq!(socket.send(b"x").unwrap(), 1));
    send(&sockets);
    let full = only(&probe.ledger()).untracked;
    assert!(full > 0, "there was room for all");
    std::thread::sleep(ms(300));
    assert_eq!(only(&probe.ledger()).open, 0);
    send(&sockets[..ROOM]);
    let ledger = probe.stop();
    assert_eq!(only(&ledger).untracked, full, "{ledger}");
    assert_eq!(only(&ledger).started, 3 * ROOM as u64, "{ledger}");
}

/// An empty function seems to take some time, which is the probe's own; it is less than what a real one takes.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn the_probes_own_part_of_a_latency() {
    let own = LatencyProbe::empty_call().unwrap();
    assert!(own.count() >= 10_000, "{own}");
    let probe = LatencyProbe::builder().function("ip_rcv").events(Events::None).attach().unwrap();
    ping_pong(&udp_to_itself(), 1_000, b"x");
    let real = probe.histogram("ip_rcv").unwrap();
    assert!(own.quantile(0.5) > Some(Duration::ZERO) && own.quantile(0.5) < real.quantile(0.5), "{own} {real}");
}

/// What the programs take is known where the kernel counts it: a run at each end of each call.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn what_the_programs_take() {
    let probe = LatencyProbe::builder().function("ip_rcv").events(Events::None).attach().unwrap();
    assert_eq!(probe.cost().spans[0].starts.runs, 0, "nobody counts");
    let statistics = ProgramStatistics::enable().unwrap();
    ping_pong(&udp_to_itself(), 1_000, b"x");
    drop(statistics);
    let cost = probe.cost().spans[0].clone();
    assert_eq!(cost.starts.runs + cost.ends.runs, 2_000, "{cost}");
    assert!(cost.starts.mean() > Some(Duration::ZERO), "{cost}");
}
