//! How calls are paired: by what this kernel has for it, and where that is used up by what every kernel has.

use dwell::{Events, LatencyProbe, Pairing};

use crate::support::{attach_paired, eventually, finish, has_sessions, only, pairings, ping_pong, udp_to_itself};

/// Sessions where the kernel has them, unless frames are asked for; else frames.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn sessions_where_there_are_any() {
    const COUNT: u64 = 100;
    for events in [Events::None, Events::All] {
        // With and without a packet, an argument, a value to return: for each there are programs of their own.
        let functions = ["ip_rcv", "udp_sendmsg", "sock_def_readable", "net_rx_action"];
        let builder = || functions.iter().fold(LatencyProbe::builder(), |builder, &name| builder.function(name));
        let probe = builder().events(events).attach().unwrap();
        assert!(probe.spans().iter().all(|span| span.pairing == pairings()[0]), "{:?}", probe.spans());
        let frames = attach_paired(builder().events(events), Pairing::Frame);
        ping_pong(&udp_to_itself(), COUNT as usize, b"x");
        // A softirq may still be on its way out.
        for probe in [&probe, &frames] {
            eventually("all have ended", || probe.ledger().spans.iter().all(|account| account.open == 0));
        }
        for probe in [probe, frames] {
            let (received, ledger) = finish(probe);
            for function in &functions[..3] {
                let account = ledger.get(function).unwrap();
                assert_eq!((account.completed, account.unmatched), (COUNT, 0), "{ledger}");
                assert!(account.is_lossless(), "{ledger}");
            }
            let emitted: u64 = ledger.spans.iter().map(|account| account.emitted).sum();
            assert_eq!(received.len() as u64, emitted, "{ledger}");
            assert!(ledger.get("net_rx_action").unwrap().completed > 0, "{ledger}");
            assert_eq!(emitted > 0, events == Events::All, "{ledger}");
        }
    }
}

/// Several probes on one function have a session each. A kernel may have room for no more than four cookies; whoever comes
/// then is paired by frames, and as exact.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn sessions_beside_each_other() {
    const COUNT: usize = 300;
    let attach = || LatencyProbe::builder().function("udp_sendmsg").ring_bytes(256 << 10).attach().unwrap();
    let pairing = |probe: &LatencyProbe| probe.spans()[0].pairing;
    let socket = udp_to_itself();
    let mut probes: Vec<_> = (0..6).map(|_| attach()).collect();
    // And one by frames in any case, and one of another kind.
    probes.push(attach_paired(LatencyProbe::builder().function("udp_sendmsg"), Pairing::Frame));
    let silent = LatencyProbe::builder().function("udp_sendmsg").events(Events::None).attach().unwrap();
    let sessions = probes.iter().take_while(|probe| pairing(probe) == Pairing::Session).count();
    println!("{sessions} sessions");
    assert!(if has_sessions() { sessions >= 4 } else { sessions == 0 }, "{sessions} sessions");
    assert!(probes[sessions..].iter().all(|probe| pairing(probe) == Pairing::Frame));
    ping_pong(&socket, COUNT, b"x");

    // Room that is made is used again.
    let (events, ledger) = finish(probes.remove(0));
    assert_eq!(events.len(), COUNT, "{ledger}");
    assert!(only(&ledger).is_lossless() && events.iter().all(|event| event.ret == Some(1)), "{ledger}");
    let late = attach();
    assert_eq!(pairing(&late), pairings()[0]);
    ping_pong(&socket, COUNT, b"x");
    for (probe, calls) in probes.into_iter().map(|probe| (probe, 2 * COUNT)).chain([(late, COUNT)]) {
        assert_eq!(probe.histogram("udp_sendmsg").unwrap().count(), calls as u64);
        let (events, ledger) = finish(probe);
        assert_eq!(events.len(), calls, "{ledger}");
        assert!(only(&ledger).is_lossless(), "{ledger}");
    }
    assert_eq!(silent.histogram("udp_sendmsg").unwrap().count(), 2 * COUNT as u64);
}
