//! Spans by raw tracepoints, on the machine that runs the test: they work also where its kernel refuses fentry.
//!
//! Where it refuses these as well, or the test doesn't run as root, each test says so by name, and checks that the crate
//! explains it.

mod natively;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use dwell::{
    ErrorKind, Events, Hook, Key, LatencyProbe, LatencyProbeBuilder, Outcome, ProgramStatistics, Restart, Span,
};
use natively::{ONE_AT_A_TIME, possible, span_across};

/// The probe; `None` where this machine doesn't allow it, which must be explained.
fn attach(test: &str, builder: LatencyProbeBuilder) -> Option<LatencyProbe> {
    possible(test, builder.attach())
}

fn udp_to_itself() -> UdpSocket {
    natively::udp_to_itself(Duration::from_secs(60))
}

fn ping_pong(socket: &UdpSocket, count: usize) {
    for _ in 0..count {
        socket.send(b"x").unwrap();
        socket.recv(&mut [0; 8]).unwrap();
    }
}

/// N packets make N events at least (others may use loopback, too), with typed tracepoints and with plain ones.
#[test]
fn every_packet() {
    const PACKETS: usize = 1_000;
    let _alone = ONE_AT_A_TIME.lock();
    for plain in [false, true] {
        let mut builder = LatencyProbe::builder().span(span_across());
        if plain {
            builder = builder.plain_tracepoints();
        }
        let Some(probe) = attach("every_packet", builder) else { return };
        let begin = Instant::now();
        ping_pong(&udp_to_itself(), PACKETS);
        let took = begin.elapsed();
        let typed = probe.spans()[0].typed;
        assert!(!(plain && typed));
        let events = probe.events().clone();
        let ledger = probe.stop();
        assert!(ledger.is_balanced(), "{ledger}");
        let mine: Vec<_> = events.iter().filter(|event| event.pid == std::process::id()).collect();
        assert!(mine.len() >= PACKETS * 9 / 10, "{} of {PACKETS}: {ledger}", mine.len());
        assert!(ledger.spans[0].completed >= PACKETS as u64, "{ledger}");
        assert!(mine.iter().all(|event| event.latency <= took && event.outcome == Outcome::Completed));
        assert!(mine.iter().all(|event| event.skb.is_some_and(|skb| skb.len.is_some() == typed)));
    }
}

/// Datagrams that nobody wants: the function that drops them, by typed tracepoints and by plain ones, wherever addresses
/// aren't hidden.
#[test]
fn who_drops() {
    let _alone = ONE_AT_A_TIME.lock();
    let symbols = std::fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    let address = symbols.lines().find(|line| line.ends_with(" T ip_rcv")).unwrap_or("0").split(' ').next();
    let hidden = address.is_some_and(|address| address.bytes().all(|digit| digit == b'0'));
    for plain in [false, true] {
        // None goes out again as it came.
        let received = Span::between(Hook::tracepoint("netif_receive_skb"), Hook::tracepoint("net_dev_queue"));
        let mut builder = LatencyProbe::builder().span(received.with_abandoned());
        if plain {
            builder = builder.plain_tracepoints();
        }
        let Some(probe) = attach("who_drops", builder) else { return };
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        socket.send_to(b"x", nobody).unwrap();
        let events = probe.events().clone();
        let ledger = probe.stop();
        let functions: Vec<_> = events
            .iter()
            .filter(|event| event.pid == std::process::id() && event.ended_at == "tp:kfree_skb")
            .map(|event| match event.outcome {
                Outcome::Dropped { by, .. } => by.map(|function| function.as_str()),
                other => panic!("{other}: {event}"),
            })
            .collect();
        // The second has been part of the first since 7.0.
        let expected = [Some("udp_rcv"), Some("__udp4_lib_rcv")].map(|function| function.filter(|_| !hidden));
        assert!(functions.iter().any(|function| expected.contains(function)), "{functions:?} {ledger}");
    }
}

/// A million packets at some hundred addresses: no latency is longer than the run, and everything adds up.
#[test]
fn a_million_packets() {
    const PACKETS: usize = 1_000_000;
    let _alone = ONE_AT_A_TIME.lock();
    let builder = LatencyProbe::builder().span(span_across()).ring_bytes(64 << 20).channel_capacity(1 << 20);
    let begin = Instant::now();
    let Some(probe) = attach("a_million_packets", builder) else { return };
    let events = probe.events().clone();
    let longest = thread::spawn(move || events.iter().map(|event| event.latency).max());
    let half = thread::spawn(|| ping_pong(&udp_to_itself(), PACKETS * 3 / 8));
    ping_pong(&udp_to_itself(), PACKETS * 3 / 8);
    half.join().unwrap();
    tcp(PACKETS / 8);
    let ledger = probe.stop();
    let took = begin.elapsed();
    let longest = longest.join().unwrap().unwrap();
    assert!(ledger.is_balanced(), "{ledger}");
    assert!(ledger.spans[0].completed >= PACKETS as u64, "{ledger}");
    assert!(longest < took, "{longest:?} in {took:?}: {ledger}");
    println!("{took:?}, longest {longest:?}\n{ledger}");
}

/// Messages there and back, one by one: a segment with data each, and acknowledgements.
fn tcp(messages: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    }
    let mut buffer = [0; 64];
    for _ in 0..messages {
        client.write_all(&buffer).unwrap();
        server.read_exact(&mut buffer).unwrap();
        server.write_all(&buffer).unwrap();
        client.read_exact(&mut buffer).unwrap();
    }
}

/// While packets come without end, probes come and go, quickly: what is left of one that stops pairs nothing.
#[test]
fn stopping_under_load() {
    let _alone = ONE_AT_A_TIME.lock();
    let stop = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let socket = udp_to_itself();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                ping_pong(&socket, 100);
            }
        });
        let mut quickest = Duration::MAX;
        for _ in 0..10 {
            let span = span_across().on_restart(Restart::KeepFirst);
            let Some(probe) = attach("stopping_under_load", LatencyProbe::builder().span(span)) else { break };
            thread::sleep(Duration::from_millis(50));
            let events = probe.events().clone();
            let begin = Instant::now();
            let ledger = probe.stop();
            quickest = quickest.min(begin.elapsed());
            let took = begin.elapsed() + Duration::from_millis(50);
            assert!(ledger.is_balanced(), "{ledger}");
            assert!(ledger.spans[0].open <= 2, "{ledger}");
            assert!(events.iter().all(|event| event.latency < took), "{ledger}");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        // A busy machine may hold up some of them; and where no probe is allowed there is none.
        println!("the quickest stopped in {quickest:?}");
        assert!(quickest == Duration::MAX || quickest < Duration::from_millis(500), "{quickest:?}");
    });
}

/// What can't be keyed or attached is explained, also where nothing could be attached at all.
#[test]
fn explained() {
    let text = |builder: LatencyProbeBuilder| builder.attach().expect_err("it can't work").to_string();
    let from = |name: &str| Span::between(Hook::tracepoint(name), Hook::tracepoint("netif_receive_skb"));
    let Some(probe) = attach("explained", LatencyProbe::builder().span(span_across())) else { return };
    drop(probe);
    let unknown = text(LatencyProbe::builder().span(from("net_dev_qeue")));
    assert!(unknown.contains("`net_dev_qeue`") && unknown.contains("`net_dev_queue`"), "{unknown}");
    let no_key = text(LatencyProbe::builder().span(from("softirq_entry")));
    assert!(no_key.contains("`tp:softirq_entry` has no argument that is a packet (struct sk_buff *)"), "{no_key}");
    let late = text(LatencyProbe::builder().span(from("net_dev_xmit")));
    assert!(late.contains("sure to be still there") && late.contains("struct sk_buff *skb"), "{late}");
    let twice = text(LatencyProbe::builder().span(from("netif_receive_skb")));
    assert!(twice.contains("is named twice"), "{twice}");
    let call = text(LatencyProbe::builder().span(from("net_dev_queue").keyed_by(Key::Call)));
    assert!(call.contains("a call goes from the entry of a function to the exit of the same"), "{call}");
    let same = text(LatencyProbe::builder().span(span_across()).span(span_across().named("the same")));
    assert!(same.contains("`across` and `the same` are the same span"), "{same}");

    // Best effort keeps what works, and says what doesn't.
    let both = LatencyProbe::builder().span(span_across()).span(from("no_such_tracepoint").named("no")).best_effort();
    let probe = both.attach().unwrap();
    assert_eq!(probe.spans().len(), 1);
    assert_eq!(probe.failures().len(), 1);
    assert_eq!(probe.failures()[0].span, "no");
    ping_pong(&udp_to_itself(), 10);
    let ledger = probe.stop();
    assert!(ledger.spans[0].completed >= 10 && ledger.is_balanced(), "{ledger}");
    let none = LatencyProbe::builder().span(from("no_such_tracepoint")).best_effort().attach().unwrap_err();
    assert!(none.to_string().contains("no_such_tracepoint"), "{none}");
}

/// Where the kernel counts the runs of programs, the probe says what its own have taken; where it doesn't, nothing.
#[test]
fn costs() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Some(probe) = attach("costs", LatencyProbe::builder().span(span_across()).events(Events::None)) else { return };
    let statistics = match ProgramStatistics::enable() {
        Ok(statistics) => statistics,
        Err(error) => {
            println!("costs: this machine doesn't count the runs of programs: {error}");
            assert!(matches!(error.kind(), ErrorKind::NoPrivilege { .. } | ErrorKind::System { .. }), "{error}");
            return;
        }
    };
    let before = probe.cost().spans[0].clone();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(socket.local_addr().unwrap()).unwrap();
    for _ in 0..1_000 {
        socket.send(b"x").unwrap();
        socket.recv(&mut [0; 1]).unwrap();
    }
    let after = probe.cost().spans[0].clone();
    drop(statistics);
    assert!(after.starts.runs >= before.starts.runs + 1_000, "{after}");
    assert!(after.ends.runs >= before.ends.runs + 1_000, "{after}");
    let mean = after.starts.mean().unwrap();
    assert!(mean > Duration::ZERO && mean < Duration::from_micros(100), "{after}");
}
