//! Each call gets its own latency: never another's, whatever happens meanwhile.

use std::collections::HashMap;
use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use dwell::{Events, LatencyEvent, LatencyProbe, MonotonicTime, Pairing, SpanLedger};

use crate::support::{
    SetOnDrop, attach_paired, eventually, finish, gettid, ms, only, others_first, pairings, ping_pong, run,
    udp_to_itself, would_block,
};

/// A probe of these functions, whose calls are paired this way.
fn probe(pairing: Pairing, functions: &[&str]) -> LatencyProbe {
    let builder = functions.iter().fold(LatencyProbe::builder(), |builder, function| builder.function(*function));
    attach_paired(builder, pairing)
}

/// A call that waits in the kernel for a known time takes that long.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_blocking_receive_takes_as_long_as_it_blocks() {
    for &pairing in pairings() {
        let probe = probe(pairing, &["udp_recvmsg"]);
        for wait in [20, 100, 400].map(ms) {
            let socket = udp_to_itself();
            let before = MonotonicTime::now();
            let tid = thread::scope(|scope| {
                let receiver = scope.spawn(|| {
                    socket.recv(&mut [0; 8]).expect("the datagram");
                    gettid()
                });
                eventually("it waits", || only(&probe.ledger()).open == 1);
                thread::sleep(wait);
                socket.send(b"go").unwrap();
                receiver.join().unwrap()
            });
            let event = probe.events().recv_timeout(crate::support::PATIENCE).unwrap();
            assert_eq!(event.tid, tid);
            assert_eq!(event.ret, Some(2), "bytes received");
            assert!(event.latency >= wait, "{event}");
            let outer = Duration::from_nanos(MonotonicTime::now().as_nanos() - before.as_nanos());
            assert!(event.latency <= outer && event.start >= before, "{event} within {outer:?}");
            assert!(event.latency < wait + ms(250), "{event} for a wait of {wait:?}");
        }
        assert!(finish(probe).1.spans[0].is_lossless());
    }
}

/// Spans of one thread that overlap must lie within each other. Returns how deep they nest.
#[track_caller]
fn assert_nested(events: &[LatencyEvent]) -> usize {
    let mut by_thread: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
    for event in events {
        by_thread.entry(event.tid).or_default().push((event.start.as_nanos(), event.end().as_nanos()));
    }
    let mut deepest = 0;
    for (tid, spans) in &mut by_thread {
        // Outer ones first where they begin together.
        spans.sort_by_key(|&(start, end)| (start, std::cmp::Reverse(end)));
        let mut open: Vec<(u64, u64)> = Vec::new();
        for &(start, end) in spans.iter() {
            open.retain(|&(_, outer)| outer > start);
            if let Some(&(_, outer)) = open.last() {
                assert!(end <= outer, "thread {tid}: a call ends at {end}, within one that ended at {outer}");
            }
            open.push((start, end));
            deepest = deepest.max(open.len());
        }
    }
    deepest
}

/// Three VLANs stacked on a device: the same function runs four times within itself for each packet.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn nested_calls_are_paired_inside_out() {
    const PACKETS: usize = 500;
    run("modprobe dummy && modprobe 8021q");
    run("ip link add stack0 type dummy && ip link set stack0 up");
    for (below, vlan) in [("stack0", "stack1"), ("stack1", "stack2"), ("stack2", "stack3")] {
        run(&format!("ip link add link {below} name {vlan} type vlan id 5 && ip link set {vlan} up"));
    }
    run("ip addr add 10.99.0.1/24 dev stack3 && ip neigh add 10.99.0.2 lladdr 02:00:00:00:00:02 dev stack3");
    // The devices announce themselves for a while, with packets of their own.
    thread::sleep(ms(500));

    for &pairing in pairings() {
        let probe = probe(pairing, &["__dev_queue_xmit"]);
        let socket = UdpSocket::bind("10.99.0.1:0").unwrap();
        for _ in 0..PACKETS {
            socket.send_to(b"down", "10.99.0.2:9").unwrap();
        }
        let (events, ledger) = finish(probe);

        let mut mine: Vec<_> = events.into_iter().filter(|event| event.tid == gettid()).collect();
        assert_eq!(mine.len(), 4 * PACKETS, "{ledger}");
        assert_eq!(assert_nested(&mine), 4);
        // In the order in which they ended, the innermost of each packet comes first and took least. (Of several CPUs they
        // come as they are met there.)
        mine.sort_by_key(LatencyEvent::end);
        for packet in mine.chunks(4) {
            assert!(packet.windows(2).all(|pair| pair[0].latency < pair[1].latency), "{packet:?}");
            assert!(packet.windows(2).all(|pair| pair[0].start > pair[1].start), "{packet:?}");
        }
        let account = only(&ledger);
        assert!(account.is_lossless() && account.open == 0, "{account}");
    }
    run("ip link del stack0");
}

/// The answer to a ping is sent by a softirq on top of the call that sends the ping.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn softirqs_on_top_of_the_same_function() {
    for &pairing in pairings() {
        let probe = probe(pairing, &["ip_output"]);
        run("ping -q -c 200 -i 0.002 127.0.0.1");
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        assert_eq!(account.started, 400, "200 there and 200 back: {account}");
        assert!(account.is_lossless() && account.open == 0 && account.unmatched == 0, "{account}");
        assert_eq!(events.len(), 400);
        assert_eq!(assert_nested(&events), 2, "the answer within the question");
    }
}

/// TCP on loopback sends acknowledgements from within its own sending.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn tcp_nests_in_itself() {
    use std::io::{Read as _, Write as _};
    for &pairing in pairings() {
        let probe = probe(pairing, &["__tcp_transmit_skb", "__dev_queue_xmit", "tcp_v4_rcv"]);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let mut buffer = [0; 1_000];
        for _ in 0..1_000 {
            client.write_all(&buffer).unwrap();
            server.read_exact(&mut buffer).unwrap();
        }
        drop((client, server));
        let (events, ledger) = finish(probe);
        for account in &ledger.spans {
            assert!(account.completed > 1_000, "{account}");
            assert!(account.is_lossless() && account.open == 0 && account.unmatched == 0, "{account}");
            let own: Vec<_> = events.iter().filter(|event| event.span == account.span).cloned().collect();
            assert_nested(&own);
        }
    }
}

/// Packets handed to idle CPUs: everything there runs as pid 0.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn idle_cpus() {
    const COUNT: usize = 2_000;
    let rps = "/sys/class/net/lo/queues/rx-0/rps_cpus";
    // All to CPU 1, while this thread sends from CPU 0.
    run(&format!("echo 2 > {rps}"));
    run(&format!("taskset -p 1 {}", gettid()));
    for &pairing in pairings() {
        let builder = LatencyProbe::builder().function("ip_rcv").channel_capacity(2 * COUNT);
        let probe = attach_paired(builder, pairing);
        let before = MonotonicTime::now();
        ping_pong(&udp_to_itself(), COUNT, b"x");
        let outer = MonotonicTime::now().as_nanos() - before.as_nanos();
        let (events, ledger) = finish(probe);

        let account = only(&ledger);
        assert_eq!(account.delivered, COUNT as u64, "{account}");
        assert!(account.is_lossless() && account.open == 0 && account.unmatched == 0, "{account}");
        let idle = events.iter().filter(|event| event.tid == 0).count();
        assert!(idle > COUNT / 10, "only {idle} ran on the idle task");
        assert!(events.iter().all(|event| event.cpu_start == 1 && event.cpu_end == 1), "another CPU");
        let sum: u128 = events.iter().map(|event| event.latency.as_nanos()).sum();
        assert!(sum < u128::from(outer), "{sum} ns of calls within {outer} ns");
    }
    run(&format!("echo 0 > {rps}; taskset -p 3 {}", gettid()));
}

/// Threads that sleep in the function, each for its own time, and are moved between CPUs meanwhile.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn sleeping_and_migrating() {
    const THREADS: usize = 32;
    const ROUNDS: usize = 5;
    for &pairing in pairings() {
        let probe = probe(pairing, &["udp_recvmsg"]);
        let done = AtomicBool::new(false);
        let waits: HashMap<u32, (Duration, Vec<[MonotonicTime; 2]>)> = thread::scope(|scope| {
            let _stop = SetOnDrop(&done);
            let threads: Vec<_> = (0..THREADS)
                .map(|n| {
                    let wait = ms(20 * (1 + n as u64 % 3));
                    scope.spawn(move || {
                        let socket = udp_to_itself();
                        socket.set_read_timeout(Some(wait)).unwrap();
                        let windows = (0..ROUNDS).map(|_| {
                            let before = MonotonicTime::now();
                            assert!(would_block(&socket.recv(&mut [0; 8]).unwrap_err()));
                            [before, MonotonicTime::now()]
                        });
                        let windows = windows.collect();
                        (gettid(), (wait, windows))
                    })
                })
                .collect();
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    for mask in [1, 2] {
                        let _ = crate::support::shell(&format!(
                            "for t in /proc/{}/task/*; do taskset -p {mask} ${{t##*/}}; done",
                            std::process::id()
                        ));
                    }
                }
            });
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        run(&format!("for t in /proc/{}/task/*; do taskset -p 3 ${{t##*/}}; done", std::process::id()));
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        assert_eq!(account.started + account.missed, (THREADS * ROUNDS) as u64, "{account}");
        // Where tasks are preempted at any point, some may be missed, and others be in doubt for that; else none.
        assert!(account.missed > 0 || account.missed_exits > 0 || account.is_lossless(), "{account}");
        assert!(account.missed > 0 || account.mismatched + account.doubtful + account.withheld == 0, "{account}");
        for event in &events {
            let (wait, windows) = &waits[&event.tid];
            assert_eq!(event.ret, Some(-11), "EAGAIN");
            let own = |[before, after]: &&[MonotonicTime; 2]| *before <= event.start && event.end() <= *after;
            let own: Vec<_> = windows.iter().filter(own).collect();
            let [[before, after]] = own[..] else { panic!("{event} for {wait:?}: {windows:?}") };
            // Timers go by ticks, of which an emulated machine may catch up on some at once: then the wait was shorter.
            let window = Duration::from_nanos(after.as_nanos() - before.as_nanos());
            let wait = window.min(*wait);
            assert!(event.latency + ms(15) >= wait, "{event} for {wait:?}");
        }
        assert!(events.iter().any(|event| event.cpu_start != event.cpu_end), "none was moved");
    }
}

/// A task killed inside the call returns from it, with an error, once.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn killed_inside_the_call() {
    const VICTIMS: u64 = 10;
    for &pairing in pairings() {
        let probe = probe(pairing, &["inet_csk_accept"]);
        for n in 1..=VICTIMS {
            let mut victim = Command::new("nc").args(["-l", "-p", "7777"]).stdin(Stdio::null()).spawn().unwrap();
            eventually("it waits for a connection", || only(&probe.ledger()).open == 1);
            victim.kill().unwrap();
            victim.wait().unwrap();
            eventually("it has returned", || only(&probe.ledger()).delivered == n);
        }
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        assert_eq!((account.started, account.completed, account.open), (VICTIMS, VICTIMS, 0), "{account}");
        // A struct sock * that is NULL: the error comes by another way.
        assert!(events.iter().all(|event| event.ret == Some(0)), "{events:?}");
    }
}

/// Has the kernel preempt tasks at any point, where it lets itself be switched to that, as long as this lives: it is
/// where most programs are skipped.
struct FullPreemption(Option<String>);

impl FullPreemption {
    const MODES: &str = "/sys/kernel/debug/sched/preempt";

    fn begin() -> Self {
        let modes = std::fs::read_to_string(Self::MODES).ok();
        let default = modes.and_then(|modes| Some(modes.split_once('(')?.1.split_once(')')?.0.to_owned()));
        if default.is_some() {
            std::fs::write(Self::MODES, "full").expect("it lists the mode");
        }
        Self(default)
    }
}

impl Drop for FullPreemption {
    fn drop(&mut self) {
        if let Some(default) = &self.0 {
            std::fs::write(Self::MODES, default).expect("it was in force");
        }
    }
}

/// What each thread knows of its calls of `udp_sendmsg`, by thread and bytes sent: when it made them.
type Windows = HashMap<(u32, i64), (u64, u64)>;

/// Sends 1, 2, ... bytes, `calls` times or until `done`. Each call is recognised by its return value.
fn send_growing(calls: usize, done: &AtomicBool) -> Windows {
    // Nobody reads, so most are dropped on arrival; the call is the same.
    let socket = udp_to_itself();
    let payload = vec![0; calls];
    let tid = gettid();
    let mut windows = Windows::with_capacity(calls);
    for len in 1..=calls {
        if done.load(Ordering::Relaxed) {
            break;
        }
        let before = MonotonicTime::now().as_nanos();
        socket.send(&payload[..len]).unwrap();
        windows.insert((tid, len as i64), (before, MonotonicTime::now().as_nanos()));
    }
    windows
}

/// Each event must lie within the window of its own call: a latency of any other call would stand out.
#[track_caller]
fn assert_own(events: &[LatencyEvent], windows: &Windows, account: &SpanLedger) {
    for event in events {
        let (before, after) = windows[&(event.tid, event.ret.unwrap())];
        let (start, end) = (event.start.as_nanos(), event.end().as_nanos());
        assert!(before <= start && end <= after, "{event}: {start}..{end} is not within {before}..{after}; {account}");
    }
}

/// More busy threads than CPUs, in a function that can be preempted.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn preempted_calls_keep_their_own_latency() {
    const THREADS: usize = 16;
    const CALLS: usize = 2_000;
    let _preempted = FullPreemption::begin();
    for &pairing in pairings() {
        let builder = LatencyProbe::builder().function("udp_sendmsg").channel_capacity(2 * THREADS * CALLS);
        let probe = attach_paired(builder, pairing);
        let never = AtomicBool::new(false);
        let windows: Windows = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(|| send_growing(CALLS, &never))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        println!("{account}");
        assert_eq!(account.started + account.missed, (THREADS * CALLS) as u64, "{account}");
        assert_eq!((account.ring_dropped, account.channel_dropped), (0, 0), "{account}");
        assert_eq!(events.len() as u64, account.delivered, "{account}");
        assert_own(&events, &windows, account);
    }
}

/// The same where nothing but the histogram is asked for, which leaves no event to look at: of no length there are more
/// latencies than calls that took as long, and what is in doubt is taken out again, whenever somebody looks.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn preempted_calls_are_no_longer_in_the_histogram() {
    const THREADS: usize = 16;
    const CALLS: usize = 1_500;
    let _preempted = FullPreemption::begin();
    for &pairing in pairings() {
        let probe = attach_paired(LatencyProbe::builder().function("udp_sendmsg").events(Events::None), pairing);
        let never = AtomicBool::new(false);
        let windows: Windows = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(|| send_growing(CALLS, &never))).collect();
            for _ in 0..5 {
                probe.histogram("udp_sendmsg").unwrap();
                thread::sleep(ms(50));
            }
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let histogram = probe.histogram("udp_sendmsg").unwrap();
        let ledger = probe.stop();
        let account = only(&ledger);
        println!("{account}");
        assert!(account.is_balanced(), "{account}");
        assert_eq!(account.started + account.missed, (THREADS * CALLS) as u64, "{account}");
        assert_eq!(histogram.count(), account.completed, "{account}");
        assert!(account.doubtful == 0 || pairing == Pairing::Frame, "{account}");
        let mut windows: Vec<u64> = windows.into_values().map(|(before, after)| after - before).collect();
        windows.sort_unstable();
        let buckets: Vec<_> = histogram.buckets().collect();
        let mut counted = 0;
        for bucket in buckets.iter().rev() {
            counted += bucket.count as usize;
            let calls = windows.len() - windows.partition_point(|window| u128::from(*window) < bucket.lower.as_nanos());
            assert!(counted <= calls, "{counted} of {calls} took {:?} or more: {account}\n{histogram:#}", bucket.lower);
        }
    }
}

/// Attaching and detaching while the function is called all the time makes no latencies of half calls.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn attaching_and_stopping_under_load() {
    const THREADS: usize = 4;
    const CALLS: usize = 60_000;
    for &pairing in pairings() {
        let done = AtomicBool::new(false);
        let mut all = Vec::new();
        let windows: Windows = thread::scope(|scope| {
            let stop = SetOnDrop(&done);
            let send = || {
                others_first();
                send_growing(CALLS, &done)
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(send)).collect();
            for _ in 0..4 {
                let builder = LatencyProbe::builder().function("udp_sendmsg").channel_capacity(1 << 18);
                let probe = attach_paired(builder, pairing);
                thread::sleep(ms(100));
                let (events, ledger) = finish(probe);
                let account = only(&ledger).clone();
                println!("{account}");
                assert!(account.missed > 0 || account.unmatched <= THREADS as u64, "{account}");
                all.push((events, account));
            }
            drop(stop);
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().map(|(events, _)| events.len()).sum::<usize>() > 100, "the load was over too soon");
        for (events, account) in &all {
            assert_own(events, &windows, account);
        }
    }
}

/// A softirq that runs the function on top of a task that runs it as well, on one CPU: it may interrupt the programs
/// themselves, so that the kernel skips them, without any task being switched out.
///
/// While a call runs on that CPU, in the task or on top of it, the task gets nowhere. So none may span a moment at which
/// the task looked at the clock.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn interrupted_programs_make_no_latency() {
    use std::os::unix::net::UnixDatagram;
    let time = 8_000_000_000 / pairings().len() as u64;
    run("echo 1 > /sys/class/net/lo/queues/rx-0/rps_cpus");
    for &pairing in pairings() {
        let builder = LatencyProbe::builder().function("sock_def_readable").channel_capacity(1 << 20);
        let probe = attach_paired(builder, pairing);
        run(&format!("for t in /proc/{}/task/*; do taskset -p 2 ${{t##*/}}; done", std::process::id()));
        let done = AtomicBool::new(false);
        let moments: Vec<u64> = thread::scope(|scope| {
            let _stop = SetOnDrop(&done);
            // From CPU 1, datagrams that are received in a softirq on CPU 0.
            scope.spawn(|| {
                let socket = udp_to_itself();
                socket.set_nonblocking(true).unwrap();
                while !done.load(Ordering::Relaxed) {
                    let _ = socket.send(b"x");
                    thread::sleep(Duration::from_micros(100));
                    while socket.recv(&mut [0; 8]).is_ok() {}
                }
            });
            // On CPU 0, the function in process context.
            let task = scope.spawn(|| {
                run(&format!("taskset -p 1 {}", gettid()));
                let (a, b) = UnixDatagram::pair().unwrap();
                let mut moments = vec![MonotonicTime::now().as_nanos()];
                while moments[moments.len() - 1] < moments[0] + time {
                    a.send(b"x").unwrap();
                    b.recv(&mut [0; 8]).unwrap();
                    moments.push(MonotonicTime::now().as_nanos());
                }
                moments
            });
            task.join().unwrap()
        });
        let (mut events, ledger) = finish(probe);
        run(&format!("for t in /proc/{}/task/*; do taskset -p 3 ${{t##*/}}; done", std::process::id()));
        println!("{ledger}");
        events.retain(|event| event.cpu_start == 0 && event.cpu_end == 0);
        assert!(events.len() > 1_000, "{ledger}");
        for event in &events {
            let (start, end) = (event.start.as_nanos(), event.end().as_nanos());
            let next = moments.partition_point(|&moment| moment <= start);
            let spanned = moments[next..].iter().take_while(|&&moment| moment < end).count();
            assert_eq!(spanned, 0, "{event} spans {spanned} rounds of its thread; {ledger}");
        }
    }
    run("echo 0 > /sys/class/net/lo/queues/rx-0/rps_cpus");
}
