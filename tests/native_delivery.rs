//! How events are handed over, on the machine that runs the test: by raw tracepoints, which work also where its kernel
//! refuses fentry. Where it refuses these as well, or the test doesn't run as root, each test says so by name.

mod natively;

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use dwell::{Hook, LatencyProbe, LatencyProbeBuilder, MonotonicTime, Span};
use natively::{ONE_AT_A_TIME, possible, span_across, udp_to_itself};

/// For what comes in a moment, on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(30);

fn across() -> LatencyProbeBuilder {
    LatencyProbe::builder().span(span_across())
}

fn ping_pong(count: u64) {
    let socket = udp_to_itself(PATIENCE);
    for _ in 0..count {
        socket.send(b"x").unwrap();
        socket.recv(&mut [0; 8]).unwrap();
    }
}

/// Each event is met by the callback, on one thread, and shows there what a copy of it shows.
#[test]
fn callback() {
    const PACKETS: u64 = 10_000;
    let _alone = ONE_AT_A_TIME.lock();
    let calls = Arc::new(AtomicU64::new(0));
    let (counter, (sender, kept)) = (Arc::clone(&calls), mpsc::sync_channel(1));
    let probe = across().attach_with(move |event| {
        counter.fetch_add(1, Ordering::Relaxed);
        assert_eq!(event.span(), "across");
        assert_eq!(event.to_string(), event.to_event().to_string());
        assert_eq!(event.end(), event.to_event().end());
        let _ = sender.try_send((event.to_event(), thread::current().name().map(str::to_owned)));
    });
    let Some(probe) = possible("callback", probe) else { return };
    assert!(probe.events().recv().is_err() && probe.batches().recv().is_err(), "there is another way");
    ping_pong(PACKETS);
    let ledger = probe.stop();
    assert!(ledger.is_balanced() && ledger.spans[0].delivered >= PACKETS, "{ledger}");
    assert_eq!(ledger.spans[0].delivered, calls.load(Ordering::Relaxed));
    let (event, thread) = kept.recv().unwrap();
    assert_eq!((&*event.span, thread.as_deref()), ("across", Some("dwell-reader")));
}

/// A callback that panics isn't called again. Nothing else breaks, and what it doesn't get is counted.
#[test]
fn panicking_callback() {
    let _alone = ONE_AT_A_TIME.lock();
    let mut left = 3;
    let probe = across().attach_with(move |event| {
        left -= 1;
        assert!(left > 0, "this is how the test wants it: {event}");
    });
    let Some(probe) = possible("panicking_callback", probe) else { return };
    ping_pong(100);
    let ledger = probe.stop();
    assert!(ledger.is_balanced(), "{ledger}");
    assert_eq!(ledger.spans[0].delivered, 3, "{ledger}");
    assert!(ledger.spans[0].channel_dropped >= 97, "{ledger}");
}

/// All events come, in batches of the size asked for or less, and none of them is empty.
#[test]
fn batches() {
    const PACKETS: u64 = 10_000;
    let _alone = ONE_AT_A_TIME.lock();
    let probe = across().in_batches(100).attach();
    let Some(probe) = possible("batches", probe) else { return };
    assert!(probe.events().recv().is_err(), "there is another way");
    let batches = probe.batches().clone();
    let reader = thread::spawn(move || batches.iter().map(|batch| batch.len()).collect::<Vec<_>>());
    ping_pong(PACKETS);
    let ledger = probe.stop();
    let sizes = reader.join().unwrap();
    assert!(ledger.is_balanced() && ledger.spans[0].completed >= PACKETS, "{ledger}");
    assert_eq!(ledger.spans[0].delivered, sizes.iter().sum::<usize>() as u64, "{ledger}");
    assert!(sizes.iter().all(|size| (1..=100).contains(size)), "{sizes:?}");
}

/// A program that doesn't read loses what there is no room for; the rest is there at the end, to the last event.
#[test]
fn batches_unread() {
    let _alone = ONE_AT_A_TIME.lock();
    let Some(probe) = possible("batches_unread", across().in_batches(100).channel_capacity(1_000).attach()) else {
        return;
    };
    let batches = probe.batches().clone();
    ping_pong(2_000);
    let ledger = probe.stop();
    let account = &ledger.spans[0];
    assert!(ledger.is_balanced() && account.channel_dropped >= 1_000, "{ledger}");
    // Besides the first few, all batches are full.
    assert!((901..=1_000).contains(&account.delivered), "{ledger}");
    assert_eq!(batches.iter().map(|batch| batch.len()).sum::<usize>() as u64, account.delivered);
}

/// At a low rate an event is there within 100 ms, whatever the pause before it, and by itself also in batches.
#[test]
fn in_time() {
    const BOUND: Duration = Duration::from_millis(100);
    let _alone = ONE_AT_A_TIME.lock();
    for in_batches in [false, true] {
        let builder = if in_batches { across().in_batches(1_024) } else { across() };
        let Some(probe) = possible("in_time", builder.attach()) else { return };
        let mut delays = Vec::new();
        for pause in [0, 1, 3, 7, 12, 16, 20, 25, 30, 36, 45, 60, 90, 130, 200, 400, 700, 1_100] {
            thread::sleep(Duration::from_millis(pause));
            ping_pong(1);
            // The packet is one that this process has sent; others may use loopback, too.
            let end = loop {
                let mut events = if in_batches {
                    probe.batches().recv_timeout(PATIENCE).unwrap().to_vec()
                } else {
                    vec![probe.events().recv_timeout(PATIENCE).unwrap()]
                };
                events.retain(|event| event.pid == std::process::id());
                if let Some(event) = events.last() {
                    break event.end();
                }
            };
            delays.push(Duration::from_nanos(MonotonicTime::now().as_nanos() - end.as_nanos()));
        }
        println!("{delays:?}");
        // The machine may be busy with other things once or twice.
        assert!(delays.iter().filter(|delay| **delay > BOUND).count() <= 2, "{delays:?}");
    }
}

/// A reader that has nothing to read sleeps, and takes less than a hundredth of a CPU.
#[test]
fn idle() {
    const SECONDS: u64 = 5;
    let _alone = ONE_AT_A_TIME.lock();
    let quiet = Span::between(Hook::tracepoint("tcp_retransmit_skb"), Hook::tracepoint("net_dev_queue"));
    let Some(probe) = possible("idle", LatencyProbe::builder().span(quiet).attach()) else { return };
    thread::sleep(Duration::from_millis(500));
    let (before, ran_before) = of_reader();
    thread::sleep(Duration::from_secs(SECONDS));
    let (sleeps, ran) = of_reader();
    let (sleeps, ran) = (sleeps - before, ran - ran_before);
    println!("{sleeps} in {SECONDS} s, {ran:?} of CPU");
    assert!(sleeps < 10 * SECONDS, "{sleeps} in {SECONDS} s");
    assert!(ran < Duration::from_secs(SECONDS) / 100, "{ran:?} in {SECONDS} s");
    drop(probe);
}

/// How often the reader's thread has gone to sleep, and how long it has run.
fn of_reader() -> (u64, Duration) {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is mounted");
    let of_task = |task: fs::DirEntry| {
        let comm = fs::read_to_string(task.path().join("comm")).ok()?;
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        let times = fs::read_to_string(task.path().join("schedstat")).ok()?;
        let ran = times.split(' ').next()?.parse().ok()?;
        (comm.trim() == "dwell-reader").then(|| (sleeps.trim().parse().unwrap(), Duration::from_nanos(ran)))
    };
    let mut readers = tasks.flatten().filter_map(of_task);
    let reader = readers.next().expect("a reader");
    assert_eq!(readers.next(), None);
    reader
}
