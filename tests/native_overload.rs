//! More than there is room for, on the machine that runs the test: by raw tracepoints, which work also where its kernel
//! refuses fentry. Where it refuses these as well, or the test doesn't run as root, each test says so by name.

mod natively;

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use dwell::{LatencyProbe, LatencyProbeBuilder, Ledger, SpanLedger};
use natively::{ONE_AT_A_TIME, possible, span_across, udp_to_itself};

/// For what comes in a moment, on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(30);

fn across() -> LatencyProbeBuilder {
    LatencyProbe::builder().span(span_across())
}

/// Sends datagrams to itself one by one; each must arrive.
fn ping_pong(count: u64) {
    let socket = udp_to_itself(PATIENCE);
    for _ in 0..count {
        socket.send(b"x").unwrap();
        socket.recv(&mut [0; 8]).unwrap();
    }
}

/// Stops the probe, which must not take longer than `most`, and whose ledger must add up.
fn stop(probe: LatencyProbe, most: Duration) -> (Duration, Ledger) {
    let before = Instant::now();
    let ledger = probe.stop();
    let took = before.elapsed();
    assert!(took < most, "stopping took {took:?}: {ledger}");
    ledger.check().unwrap_or_else(|imbalance| panic!("{imbalance}"));
    (took, ledger)
}

fn account(ledger: &Ledger) -> &SpanLedger {
    &ledger.spans[0]
}

/// Where no reader is blocked, and where one is.
const UNBLOCKED: Duration = Duration::from_millis(500);
const BLOCKED: Duration = Duration::from_secs(1);

/// With backpressure a slow reader gets everything that the rings have room for, through however small a channel.
#[test]
fn backpressure() {
    const PACKETS: u64 = 5_000;
    let _alone = ONE_AT_A_TIME.lock();
    for in_batches in [false, true] {
        let builder = across().backpressure().channel_capacity(64);
        let builder = if in_batches { builder.in_batches(16) } else { builder };
        let Some(probe) = possible("backpressure", builder.attach()) else { return };
        let (events, batches) = (probe.events().clone(), probe.batches().clone());
        let reader = thread::spawn(move || {
            let slowly = |count: usize| {
                thread::sleep(Duration::from_micros(50));
                count as u64
            };
            if in_batches {
                batches.iter().map(|batch| slowly(batch.len())).sum::<u64>()
            } else {
                events.iter().map(|_| slowly(1)).sum()
            }
        });
        ping_pong(PACKETS);
        // The rings have room for all of them.
        while account(&probe.ledger()).delivered < PACKETS {
            thread::sleep(Duration::from_millis(10));
        }
        let (_, ledger) = stop(probe, BLOCKED);
        assert!(account(&ledger).is_lossless() && account(&ledger).completed >= PACKETS, "{ledger}");
        assert_eq!(reader.join().unwrap(), account(&ledger).delivered);
    }
}

/// A program that never reads: the traffic goes on, memory doesn't grow, each event is counted as what it became, and
/// the probe stops in time. With backpressure the rings are full, too.
#[test]
fn nobody_reads() {
    const PACKETS: u64 = 20_000;
    let _alone = ONE_AT_A_TIME.lock();
    for (backpressure, in_batches) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut builder = across().channel_capacity(1_000).ring_bytes(64 << 10);
        if backpressure {
            builder = builder.backpressure();
        }
        if in_batches {
            builder = builder.in_batches(100);
        }
        let Some(probe) = possible("nobody_reads", builder.attach()) else { return };
        let (events, batches) = (probe.events().clone(), probe.batches().clone());
        // By then all that can be full is full.
        ping_pong(PACKETS / 2);
        let before = resident();
        ping_pong(PACKETS / 2);
        let grown = resident().saturating_sub(before);
        assert!(grown < 1 << 20, "{grown} bytes more");

        let (_, ledger) = stop(probe, if backpressure { BLOCKED } else { UNBLOCKED });
        let account = account(&ledger);
        assert!(account.completed >= PACKETS, "{ledger}");
        assert!((901..=1_100).contains(&account.delivered), "{ledger}");
        // On a busy machine some rings may be full without backpressure, too.
        assert!(account.ring_dropped > 0 || !backpressure, "{ledger}");
        assert!(account.channel_dropped > 0, "with backpressure, what was in the rings at last: {ledger}");
        let read = if in_batches { batches.iter().map(|batch| batch.len()).sum() } else { events.iter().count() };
        assert_eq!(read as u64, account.delivered);
    }
}

/// A callback that doesn't return can't keep the probe from stopping. What it doesn't get is counted; and when it returns
/// at last, it isn't called again, and the reader's thread ends.
#[test]
fn a_callback_that_does_not_return() {
    let _alone = ONE_AT_A_TIME.lock();
    let calls = Arc::new(AtomicU64::new(0));
    let (counter, (release, held)) = (Arc::clone(&calls), mpsc::channel::<()>());
    let probe = across().attach_with(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
        let _ = held.recv();
    });
    let Some(probe) = possible("a_callback_that_does_not_return", probe) else { return };
    ping_pong(100);
    while calls.load(Ordering::Relaxed) == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    let (took, ledger) = stop(probe, BLOCKED);
    println!("stopped in {took:?}: {ledger}");
    assert_eq!(account(&ledger).delivered, 1, "{ledger}");
    assert!(account(&ledger).channel_dropped >= 99, "{ledger}");
    assert_eq!(readers(), 1);
    drop(release);
    let end = Instant::now() + PATIENCE;
    while readers() > 0 {
        assert!(Instant::now() < end, "the reader doesn't end");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

/// A slow callback is called for a while after the probe has been stopped, but not for ever.
#[test]
fn a_slow_callback() {
    let _alone = ONE_AT_A_TIME.lock();
    let calls = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&calls);
    let probe = across().attach_with(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(20));
    });
    let Some(probe) = possible("a_slow_callback", probe) else { return };
    ping_pong(1_000);
    let (_, ledger) = stop(probe, BLOCKED);
    assert_eq!(account(&ledger).delivered, calls.load(Ordering::Relaxed), "{ledger}");
    assert!(account(&ledger).delivered > 1 && account(&ledger).channel_dropped > 0, "{ledger}");
}

/// A callback may stop its own probe, or drop it.
#[test]
fn a_callback_that_stops_its_probe() {
    let _alone = ONE_AT_A_TIME.lock();
    for by_stop in [true, false] {
        let place = Arc::new(Mutex::new(None::<LatencyProbe>));
        let (sender, stopped) = mpsc::channel();
        let own = Arc::clone(&place);
        let probe = across().attach_with(move |_| {
            let Some(probe) = own.lock().unwrap().take() else { return };
            let ledger = by_stop.then(|| probe.stop());
            let _ = sender.send(ledger);
        });
        let Some(probe) = possible("a_callback_that_stops_its_probe", probe) else { return };
        *place.lock().unwrap() = Some(probe);
        ping_pong(100);
        let ledger = stopped.recv_timeout(PATIENCE).expect("it stops");
        assert_eq!(ledger.is_some(), by_stop);
        if let Some(ledger) = ledger {
            ledger.check().unwrap_or_else(|imbalance| panic!("{imbalance}"));
        }
    }
}

/// The bytes of memory that this process has.
fn resident() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").expect("/proc is mounted");
    let pages: usize = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("the second number");
    pages * rustix::param::page_size()
}

/// How many threads of this process read for a probe.
fn readers() -> usize {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is mounted");
    let is_reader = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "dwell-reader")
    };
    tasks.flatten().filter(is_reader).count()
}
