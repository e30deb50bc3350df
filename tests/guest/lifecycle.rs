//! Several probes, many probes, and what is left of them: nothing.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use dwell::{Hook, LatencyProbe, Span};

use crate::support::{
    SetOnDrop, bpf_objects, eventually, finish, ms, only, ping_pong, probe, run, udp_to_itself, until_bpf_is_gone,
};

/// What this process holds open, and what the kernel holds of BPF: programs, maps and links.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    descriptors: usize,
    threads: usize,
    bpf: [usize; 3],
}

impl Held {
    fn now() -> Self {
        let count = |path| fs::read_dir(path).expect("/proc is mounted").count();
        Self { descriptors: count("/proc/self/fd"), threads: count("/proc/self/task"), bpf: bpf_objects() }
    }
}

/// What is held before a test: nothing of BPF, once the kernel has freed what the test before it had, and no thread
/// that is about to end: one that was joined is still listed for a moment.
fn nothing() -> Held {
    until_bpf_is_gone();
    settled()
}

/// What is held once the kernel has freed what was let go of.
fn settled() -> Held {
    let (mut held, mut unchanged) = (Held::now(), 0);
    eventually("what is held stays the same", || {
        let now = Held::now();
        unchanged = if now == held { unchanged + 1 } else { 0 };
        held = now;
        unchanged == 40
    });
    held
}

/// The kernel frees what it holds of BPF a moment after the last descriptor is closed.
#[track_caller]
fn assert_back_to(before: &Held) {
    let mut now = Held::now();
    for _ in 0..200 {
        if now == *before {
            return;
        }
        thread::sleep(ms(20));
        now = Held::now();
    }
    assert_eq!(now, *before, "something is left");
}

/// What the kernel says of trouble.
fn trouble() -> Vec<String> {
    let is_trouble =
        |line: &&str| ["WARNING:", "BUG:", "Oops", "stall", "lockup"].iter().any(|word| line.contains(word));
    run("dmesg").lines().filter(is_trouble).map(str::to_owned).collect()
}

/// The memory that this process has, in KiB.
fn resident() -> i64 {
    let status = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line of it");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// 24 times attached and detached, under traffic, or as often as `DWELL_CYCLES` says: no descriptor, thread, program, map or
/// link remains, memory doesn't become more, and the kernel has nothing to complain of.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn again_and_again() {
    const WARM_UP: usize = 8;
    let cycles = std::env::var("DWELL_CYCLES").map_or(24, |cycles| cycles.parse().expect("a number"));
    let (complaints, mut warm) = (trouble(), 0);
    let before = nothing();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = SetOnDrop(&done);
        scope.spawn(|| {
            let socket = udp_to_itself();
            while !done.load(Ordering::Relaxed) {
                ping_pong(&socket, 5, b"x");
                // On two emulated CPUs a busy loop would leave little for the rest.
                thread::sleep(ms(10));
            }
        });
        for n in 0..cycles {
            if n == WARM_UP {
                warm = resident();
            }
            let probe = if n % 8 == 7 {
                let span = Span::between(Hook::tracepoint("net_dev_queue"), Hook::entry("ip_rcv_core"));
                LatencyProbe::builder().span(span).attach().unwrap()
            } else {
                probe(&["ip_rcv"])
            };
            if n % 2 == 0 {
                drop(probe);
            } else {
                let ledger = probe.stop();
                assert!(ledger.is_balanced(), "{ledger}");
            }
        }
    });
    let now = resident();
    println!("{now} KiB, {warm} KiB after {WARM_UP} of {cycles} times");
    assert!(now < warm + 2_048, "{now} KiB, {warm} KiB after {WARM_UP} of {cycles} times");
    assert_back_to(&before);
    let new: Vec<_> = trouble().into_iter().filter(|line| !complaints.contains(line)).collect();
    assert!(new.is_empty(), "{new:#?}");
}

/// Two probes on the same function both see every call; one that goes takes nothing from the other.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn two_probes_on_one_function() {
    const COUNT: usize = 1_000;
    let (first, second) = (probe(&["ip_rcv"]), probe(&["ip_rcv", "udp_sendmsg"]));
    let socket = udp_to_itself();
    ping_pong(&socket, COUNT, b"x");
    let (events, ledger) = finish(second);
    assert_eq!(events.len(), 2 * COUNT, "{ledger}");
    assert_eq!(ledger.get("ip_rcv").unwrap().delivered, COUNT as u64, "{ledger}");
    ping_pong(&socket, COUNT, b"x");
    let (events, ledger) = finish(first);
    assert_eq!(events.len(), 2 * COUNT, "{ledger}");
    assert!(only(&ledger).is_lossless(), "{ledger}");
}

/// Four probes in four threads, moved there, kept in a box, and stopped there.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn probes_travel() {
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let probe: Box<LatencyProbe> = Box::new(probe(&["udp_sendmsg"]));
            thread::spawn(move || {
                eventually("4 calls are seen", || only(&probe.ledger()).delivered >= 4);
                finish(*probe).0.len()
            })
        })
        .collect();
    let socket = udp_to_itself();
    ping_pong(&socket, 4, b"x");
    for thread in threads {
        assert!(thread.join().unwrap() >= 4);
    }
}

/// Stopping under full load is quick, whether the events are read or not.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn stop_under_load() {
    let done = AtomicBool::new(false);
    // Attaching would take long under that load, and isn't what is asked here.
    let probes = [(); 2].map(|()| probe(&["ip_rcv", "udp_sendmsg", "__alloc_skb"]));
    thread::scope(|scope| {
        let _stop = SetOnDrop(&done);
        for _ in 0..3 {
            scope.spawn(|| {
                let socket = udp_to_itself();
                while !done.load(Ordering::Relaxed) {
                    ping_pong(&socket, 10, b"x");
                }
            });
        }
        for probe in probes {
            thread::sleep(ms(200));
            let before = Instant::now();
            let ledger = probe.stop();
            let took = before.elapsed();
            assert!(ledger.is_balanced(), "{ledger}");
            // Six detachments, beside three busy threads on two emulated CPUs.
            assert!(took < ms(30_000), "stopping took {took:?}");
        }
    });
}

/// Probes on one function until the kernel takes no more: a clear error, the others go on, and room is made again.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn as_many_as_the_kernel_allows() {
    use dwell::{ErrorKind, NotTraceable};
    let before = nothing();
    let mut probes = Vec::new();
    let error = loop {
        assert!(probes.len() < 100, "there is no limit");
        match LatencyProbe::builder().function("udp_sendmsg").ring_bytes(64 << 10).attach() {
            Ok(probe) => probes.push(probe),
            Err(error) => break error,
        }
    };
    let ErrorKind::NotTraceable { reason, .. } = error.kind() else { panic!("{error}") };
    assert_eq!(*reason, NotTraceable::TooManyProbes, "{error}");
    assert!((10..=20).contains(&probes.len()), "{} probes", probes.len());

    // Among others, which are attached at the same time: all or nothing, or all but this one, in their order.
    let among = || {
        ["ip_rcv", "tcp_sendmsg", "ip_output", "udp_sendmsg", "udp_recvmsg", "tcp_recvmsg", "ip_local_deliver"]
            .iter()
            .fold(LatencyProbe::builder().ring_bytes(64 << 10), |builder, function| builder.function(*function))
    };
    let held = settled();
    let error = among().attach().unwrap_err();
    assert_eq!(error.hook(), Some("udp_sendmsg"), "{error}");
    assert_back_to(&held);
    let others = among().best_effort().attach().unwrap();
    let failed: Vec<&str> = others.failures().iter().map(|failure| failure.span.as_str()).collect();
    assert_eq!(failed, ["udp_sendmsg"]);
    let attached: Vec<&str> = others.spans().iter().map(|span| span.name.as_str()).collect();
    assert_eq!(attached, ["ip_rcv", "tcp_sendmsg", "ip_output", "udp_recvmsg", "tcp_recvmsg", "ip_local_deliver"]);
    drop(others);

    ping_pong(&udp_to_itself(), 10, b"x");
    let (events, _) = finish(probes.pop().unwrap());
    assert_eq!(events.len(), 10);
    probes.push(probe(&["udp_sendmsg"]));
    for probe in probes {
        drop(probe);
    }
    assert_back_to(&before);
}
