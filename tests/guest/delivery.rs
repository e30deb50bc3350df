//! The three ways in which events come to a program.

use std::panic;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use dwell::{EventView, Histogram, LatencyProbe, LatencyProbeBuilder};

use crate::support::{PATIENCE, eventually, finish, only, ping_pong, udp_to_itself};

const COUNT: u64 = 5_000;

fn builder() -> LatencyProbeBuilder {
    LatencyProbe::builder().function("ip_rcv").channel_capacity(2 * COUNT as usize)
}

/// One by one, in batches, and by a callback, the same calls give the same events.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn each_way_hands_over_all() {
    let single = builder().attach().unwrap();
    let batched = builder().in_batches(256).attach().unwrap();
    let (sender, called) = mpsc::channel();
    let called_back = builder()
        .attach_with(move |event| {
            let whole = event.to_event();
            assert_eq!((whole.latency, whole.end()), (event.latency(), event.end()));
            let _ = sender.send(whole);
        })
        .unwrap();
    // What isn't the probe's way has nothing to give, and says so at once.
    assert!(batched.events().recv().is_err() && called_back.events().recv().is_err());
    assert!(single.batches().iter().next().is_none() && called_back.batches().iter().next().is_none());

    ping_pong(&udp_to_itself(), COUNT as usize, b"x");
    let histograms = [&single, &batched, &called_back].map(|probe| probe.histogram("ip_rcv").unwrap());
    let batches = batched.batches().clone();
    let receiver = thread::spawn(move || batches.iter().map(|batch| batch.to_vec()).collect::<Vec<_>>());
    let (single, ledger) = finish(single);
    assert!(only(&ledger).is_lossless(), "{ledger}");
    let (none, ledger) = finish(batched);
    assert!(only(&ledger).is_lossless() && none.is_empty(), "{ledger}");
    let (none, ledger) = finish(called_back);
    assert!(only(&ledger).is_lossless() && none.is_empty(), "{ledger}");

    let batches = receiver.join().unwrap();
    assert!(batches.iter().all(|batch| (1..=256).contains(&batch.len())), "an empty batch, or one too large");
    let all = [single, batches.concat(), called.iter().collect()];
    for (events, histogram) in all.iter().zip(&histograms) {
        assert_eq!(events.len() as u64, COUNT);
        assert_eq!(*histogram, events.iter().map(|event| event.latency).collect::<Histogram>());
        assert!(events.iter().all(|event| event.span == "ip_rcv" && event.ret == Some(0)));
    }
    // Each probe stamps the time itself, and sees the same packets.
    let packets = all.map(|mut events| {
        events.sort_by_key(|event| event.start);
        events.iter().map(|event| event.skb.expect("ip_rcv has a packet").address).collect::<Vec<_>>()
    });
    assert!(packets[0] == packets[1] && packets[0] == packets[2], "other packets");
}

/// A batch needn't be full: what comes seldom comes soon.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_batch_that_is_not_full_comes_soon() {
    let probe = builder().in_batches(1_024).attach().unwrap();
    let socket = udp_to_itself();
    for _ in 0..5 {
        ping_pong(&socket, 1, b"x");
        let batch = probe.batches().recv_timeout(PATIENCE).expect("an event");
        assert_eq!(batch.len(), 1);
    }
    assert!(only(&probe.stop()).is_lossless());
}

/// A callback that panics isn't called again; the probe goes on counting, and stops as ever.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_callback_that_panics_is_not_called_again() {
    let calls = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&calls);
    let callback = move |_: &EventView<'_>| {
        assert!(counter.fetch_add(1, Ordering::Relaxed) < 9, "enough");
    };
    let probe = builder().attach_with(callback).unwrap();
    let (said, heard) = mpsc::channel();
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let name = thread::current().name().map(str::to_owned);
        let _ = said.send((name, info.payload().downcast_ref::<&str>().map(|text| text.to_string())));
    }));
    let socket = udp_to_itself();
    ping_pong(&socket, 100, b"x");
    let message = heard.recv_timeout(PATIENCE);
    panic::set_hook(hook);
    assert_eq!(message, Ok((Some("dwell-reader".to_owned()), Some("enough".to_owned()))));
    eventually("the others are dropped", || only(&probe.ledger()).channel_dropped == 90);
    ping_pong(&socket, 100, b"x");
    assert_eq!(probe.histogram("ip_rcv").unwrap().count(), 200);
    let (_, ledger) = finish(probe);
    let account = only(&ledger);
    assert_eq!((account.completed, account.delivered, account.channel_dropped), (200, 10, 190), "{account}");
    assert_eq!(calls.load(Ordering::Relaxed), 10);
}

/// While a callback takes its time, the ring fills up, which is counted; what is traced doesn't wait for it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_slow_callback_costs_events_only() {
    let (go, wait) = mpsc::channel::<()>();
    let builder = LatencyProbe::builder().function("ip_rcv").ring_bytes(1);
    let probe = builder.attach_with(move |_| {
        let _ = wait.recv_timeout(Duration::from_secs(20));
    });
    let probe = probe.unwrap();
    ping_pong(&udp_to_itself(), 300, b"x");
    eventually("the ring is full", || only(&probe.ledger()).ring_dropped > 0);
    drop(go);
    let (_, ledger) = finish(probe);
    let account = only(&ledger);
    assert_eq!((account.started, account.completed), (300, 300), "{account}");
    assert_eq!((account.delivered + account.ring_dropped, account.channel_dropped), (300, 0), "{account}");
}

/// With backpressure nothing is lost while the rings have room, however small the channel, and however slow its reader.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn backpressure_loses_nothing() {
    for in_batches in [false, true] {
        let builder = LatencyProbe::builder().function("ip_rcv").backpressure().channel_capacity(32);
        let probe = if in_batches { builder.in_batches(8) } else { builder }.attach().unwrap();
        let (events, batches) = (probe.events().clone(), probe.batches().clone());
        ping_pong(&udp_to_itself(), 1_000, b"x");
        assert!(only(&probe.ledger()).delivered <= 32 + 2 * 8, "more than there is room for");
        let reader = thread::spawn(move || {
            if in_batches { batches.iter().map(|batch| batch.len()).sum() } else { events.iter().count() }
        });
        eventually("all are delivered", || only(&probe.ledger()).delivered == 1_000);
        let (_, ledger) = finish(probe);
        assert!(only(&ledger).is_lossless(), "{ledger}");
        assert_eq!(reader.join().unwrap(), 1_000);
    }
}

/// Whoever never reads, or doesn't return from the callback, doesn't keep the probe from stopping. What isn't taken is
/// counted.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn stopping_waits_for_nobody() {
    let unread = LatencyProbe::builder().function("ip_rcv").backpressure().channel_capacity(32).attach().unwrap();
    let (release, held) = mpsc::channel::<()>();
    let stuck = builder().attach_with(move |_| {
        let _ = held.recv();
    });
    let stuck = stuck.unwrap();
    ping_pong(&udp_to_itself(), 1_000, b"x");
    eventually("both are held up", || only(&unread.ledger()).delivered == 32 && only(&stuck.ledger()).delivered == 1);
    for (probe, delivered) in [(unread, 32), (stuck, 1)] {
        let before = Instant::now();
        let ledger = probe.stop();
        // What it may take natively, and detaching, which in an emulated machine takes its time.
        assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
        let account = only(&ledger);
        assert_eq!((account.completed, account.delivered), (1_000, delivered), "{account}");
        assert_eq!(account.channel_dropped + account.ring_dropped, 1_000 - delivered, "{account}");
        ledger.check().unwrap_or_else(|imbalance| panic!("{imbalance}"));
    }
    drop(release);
}
