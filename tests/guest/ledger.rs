//! Every call is accounted for.

use dwell::LatencyProbe;

use crate::support::{eventually, finish, ms, only, ping_pong, probe, udp_to_itself};

/// 20,000 datagrams are 20,000 calls of `ip_rcv`, each an event with its packet.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn twenty_thousand_datagrams() {
    const COUNT: usize = 20_000;
    let probe = LatencyProbe::builder().function("ip_rcv").channel_capacity(2 * COUNT).attach().unwrap();
    ping_pong(&udp_to_itself(), COUNT, &[7; 32]);
    let (mut events, ledger) = finish(probe);

    let account = only(&ledger);
    assert_eq!(account.started + account.missed, COUNT as u64, "{account}");
    assert_eq!(account.delivered, COUNT as u64, "{account}");
    assert!(account.is_lossless() && account.open == 0 && account.unmatched == 0, "{account}");
    assert_eq!(events.len(), COUNT);
    for event in &events {
        assert!(event.span == "ip_rcv");
        assert_eq!(event.skb.expect("ip_rcv has a packet").len, Some(20 + 8 + 32));
        assert_eq!(event.ret, Some(0), "NET_RX_SUCCESS");
    }
    // Some may be left to ksoftirqd.
    assert!(events.iter().any(|event| event.pid == std::process::id()));
    // They ran one after the other, so none begins before the one before it ended. (Of each CPU they come in order.)
    events.sort_by_key(|event| event.start);
    assert!(events.windows(2).all(|pair| pair[0].end() <= pair[1].start), "calls overlap");
}

/// What was called before `stop` is read after it, and then the channel ends.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn stop_drains() {
    for _ in 0..4 {
        let probe = probe(&["ip_rcv"]);
        ping_pong(&udp_to_itself(), 1_000, b"x");
        let (events, ledger) = finish(probe);
        assert_eq!(events.len(), 1_000, "{ledger}");
    }
}

/// A single event doesn't wait for others, whether the reader is busy or has long been idle.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn an_event_arrives_soon() {
    let probe = probe(&["ip_rcv"]);
    let socket = udp_to_itself();
    let mut waits = Vec::new();
    for idle in [0, 5, 50, 300, 1_500] {
        std::thread::sleep(ms(idle));
        let before = std::time::Instant::now();
        ping_pong(&socket, 1, b"x");
        probe.events().recv_timeout(crate::support::PATIENCE).expect("an event");
        waits.push(before.elapsed());
    }
    // An emulated machine is slow, and this bound only tells being woken from waiting for the next second.
    assert!(waits.iter().all(|wait| *wait < ms(400)), "{waits:?}");
}

/// A full channel drops and counts, and blocks nobody.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn full_channel() {
    let probe = LatencyProbe::builder().function("ip_rcv").channel_capacity(10).attach().unwrap();
    ping_pong(&udp_to_itself(), 100, b"x");
    eventually("90 events are dropped", || only(&probe.ledger()).channel_dropped == 90);
    let (events, ledger) = finish(probe);
    let account = only(&ledger);
    assert_eq!((account.completed, account.delivered, account.channel_dropped), (100, 10, 90), "{account}");
    assert!(!account.is_lossless());
    assert_eq!(events.len(), 10);
}

/// A full ring buffer drops and counts.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn full_ring() {
    // The least that any kernel takes: 8 records for each CPU, or, in one ring for all, a page.
    let probe = LatencyProbe::builder().function("ip_rcv").ring_bytes(1).attach().unwrap();
    let socket = udp_to_itself();
    // More at once than the ring holds, and before the reader's next look.
    eventually("the ring overflows", || {
        for _ in 0..200 {
            socket.send(b"x").unwrap();
        }
        while socket.set_nonblocking(true).is_ok() && socket.recv(&mut [0; 2]).is_ok() {}
        only(&probe.ledger()).ring_dropped > 0
    });
    let (events, ledger) = finish(probe);
    let account = only(&ledger);
    assert_eq!(account.started, account.completed, "{account}");
    assert_eq!(events.len() as u64, account.delivered, "{account}");
    assert_eq!(account.delivered + account.ring_dropped, account.completed, "{account}");
}

/// Calls that find no room in the in-flight table are counted, and cost the others nothing.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn full_table() {
    const THREADS: u64 = 200;
    for (in_flight, least, most) in [(1, 1, 5), (8, 5, 8), (64, 40, 64), (400, 200, 200)] {
        let probe = LatencyProbe::builder().function("udp_recvmsg").in_flight(in_flight).attach().unwrap();
        let sockets: Vec<_> = (0..THREADS).map(|_| udp_to_itself()).collect();
        std::thread::scope(|scope| {
            for socket in &sockets {
                std::thread::Builder::new()
                    .stack_size(64 << 10)
                    .spawn_scoped(scope, || socket.recv(&mut [0; 8]).expect("the datagram"))
                    .expect("a thread");
            }
            // Many threads that begin to sleep at once may keep the kernel from seeing some of them.
            eventually("all threads wait", || {
                // None has returned, so whatever was skipped is an entry: of sessions that isn't told apart sooner.
                let account = probe.ledger().spans[0].clone();
                account.open + account.untracked + account.missed + account.missed_exits == THREADS
            });
            let account = probe.ledger().spans[0].clone();
            let missed = account.missed + account.missed_exits;
            assert!(account.open <= most && account.open + missed >= least, "{account}");
            for socket in &sockets {
                socket.send(b"go").unwrap();
            }
        });
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        assert_eq!(account.started + account.missed, THREADS, "{account}");
        let lost = account.untracked + account.missed + account.missed_exits + account.mismatched;
        assert!(
            (THREADS.saturating_sub(lost)..=THREADS - account.untracked).contains(&(events.len() as u64)),
            "{account}"
        );
        assert!(account.unmatched <= account.untracked + account.missed, "{account}");
        assert!(account.unmatched + account.missed_exits >= account.untracked, "{account}");
        assert!(account.open <= account.missed_exits, "{account}");
    }
}
