//! The traffic doesn't notice: what arrives is what was sent, with probes and without.

use std::io::{Read as _, Write as _};
use std::thread;
use std::time::{Duration, Instant};

use dwell::{LatencyProbe, LatencyProbeBuilder};

use crate::lab::{Ip, Lab, Side};
use crate::support::{finish, median, udp_errors};

/// All on the way of a packet that is forwarded, or received.
const FUNCTIONS: [&str; 6] = ["__dev_queue_xmit", "ip_rcv", "ip_forward", "ip_output", "udp_rcv", "tcp_v4_rcv"];

/// With all that takes time, and a reader that never reads: the rings and the channel get full.
fn builder() -> LatencyProbeBuilder {
    let builder = FUNCTIONS.iter().fold(LatencyProbe::builder(), |builder, function| builder.function(*function));
    builder.identify().keep_slowest(10).backpressure().channel_capacity(1_000).ring_bytes(64 << 10)
}

/// Sends with the number `n` in every byte, so many bytes that all sizes get their turn, and a few at a time, so that the
/// receiver's buffer has room for them.
fn datagrams(lab: &Lab, count: u32) {
    let (left, right) = lab.udp_pair(Ip::V4);
    let datagram = |n: u32| n.to_le_bytes().repeat(1 + n as usize % 350);
    let mut buffer = [0; 2_000];
    for first in (0..count).step_by(20) {
        for n in first..first + 20 {
            left.send(&datagram(n)).expect("sent");
        }
        for n in first..first + 20 {
            let len = right.recv(&mut buffer).unwrap_or_else(|error| panic!("datagram {n}: {error}"));
            assert!(buffer[..len] == datagram(n), "datagram {n} was altered");
        }
    }
}

/// How long so many bytes take over TCP, none of which may be another.
fn stream(lab: &Lab, bytes: usize) -> Duration {
    let (mut left, mut right) = lab.tcp_pair(Ip::V4);
    // A prime, so that no segment is as another.
    let pattern: Vec<u8> = (0..=250).cycle().take(bytes).collect();
    let before = Instant::now();
    let received = thread::scope(|scope| {
        scope.spawn(|| {
            left.write_all(&pattern).expect("sent");
            left.shutdown(std::net::Shutdown::Write).expect("it is connected");
        });
        let mut received = Vec::with_capacity(bytes);
        right.read_to_end(&mut received).expect("received");
        received
    });
    assert!(received == pattern, "{} bytes of {bytes}, or others", received.len());
    before.elapsed()
}

/// Each datagram arrives, once, in order and as it was sent, with six functions on its way probed as without.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_datagram_is_dropped_or_altered() {
    const COUNT: u32 = 2_000;
    let lab = Lab::forwarding();
    let errors = || Side::BOTH.map(|side| lab.on(side, udp_errors));
    let before = errors();
    datagrams(&lab, COUNT);
    let without = lab.packets(Side::Right);
    assert_eq!(errors(), before);
    let probe = builder().attach().unwrap();
    datagrams(&lab, COUNT);
    let (_, ledger) = finish(probe);
    let (received, sent) = lab.packets(Side::Right);
    assert_eq!((received, sent), (2 * without.0, 2 * without.1));
    assert_eq!(errors(), before);
    for (function, calls) in [("ip_forward", 1), ("udp_rcv", 1), ("__dev_queue_xmit", 2)] {
        let account = ledger.get(function).expect("it is probed");
        assert_eq!(account.started + account.missed, u64::from(calls * COUNT), "{account}");
        assert!(account.ring_dropped + account.channel_dropped > 0, "nothing was full: {account}");
    }
}

/// A stream arrives as it was sent, too, and not much later. How much the emulated machine makes of it is printed; what
/// each call costs is measured by the benchmarks.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_stream_is_held_up() {
    const BYTES: usize = 8 << 20;
    let lab = Lab::forwarding();
    let three = || median((0..3).map(|_| stream(&lab, BYTES)).collect());
    stream(&lab, BYTES);
    let without = three();
    let probe = builder().attach().unwrap();
    let with = three();
    let (_, ledger) = finish(probe);
    assert!(ledger.spans.iter().all(|account| account.completed > 0 || &*account.span == "udp_rcv"), "{ledger}");
    println!("{BYTES} bytes over TCP: {without:?} without probes, {with:?} with six");
    // A probe that blocks anybody would take longer than that.
    assert!(with < 5 * without + Duration::from_secs(1), "{with:?}, and {without:?} without");
}
