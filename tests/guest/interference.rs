//! What a probe that runs for long meets: processes that stop, fork and are killed, clocks that are set, others who trace,
//! modules and CPUs that come and go. Each call is accounted for, and no latency is another's.
#![allow(unsafe_code, reason = "fork, which the standard library doesn't have")]

use std::ffi::c_int;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use dwell::{ErrorKind, LatencyEvent, LatencyProbe, MonotonicTime, NotTraceable, SpanLedger};

use crate::support::{
    PATIENCE, SetOnDrop, attach_paired, bpf_objects, eventually, example, finish, kernel_version, ms, only,
    others_first, pairings, ping_pong, ping_pong_until, probe, run, shell, udp_to_itself, until_bpf_is_gone,
};

unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
}

/// A copy of this process, and the line to it.
struct Forked {
    process: c_int,
    line: BufReader<UnixStream>,
}

impl Forked {
    /// Has a copy of this process do `work`, and then exit; it goes with its last thread, whatever it holds.
    fn begin(work: impl FnOnce(BufReader<UnixStream>)) -> Self {
        let (here, there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(PATIENCE)).unwrap();
        // SAFETY: the copy has this thread only. It runs what the test gives it, and leaves without returning.
        let process = unsafe { fork() };
        if process == 0 {
            drop(here);
            let clean = catch_unwind(AssertUnwindSafe(|| work(BufReader::new(there)))).is_ok();
            std::process::exit(if clean { 0 } else { 1 });
        }
        assert!(process > 0);
        Self { process, line: BufReader::new(here) }
    }

    /// What it says next.
    fn hear(&mut self) -> String {
        hear(&mut self.line)
    }

    fn ask(&mut self, what: &str) -> String {
        say(&self.line, what);
        self.hear()
    }

    fn signal(&self, signal: &str) {
        run(&format!("kill -{signal} {}", self.process));
    }

    /// Waits for its end; the status as wait() has it, of which 0 is success.
    fn end(self) -> c_int {
        let mut status = -1;
        // SAFETY: a number that outlives the call.
        assert_eq!(unsafe { waitpid(self.process, &mut status, 0) }, self.process);
        status
    }
}

fn say(line: &BufReader<UnixStream>, what: &str) {
    writeln!(line.get_ref(), "{what}").expect("the other is there");
}

fn hear(line: &mut BufReader<UnixStream>) -> String {
    let mut text = String::new();
    line.read_line(&mut text).expect("the other is there");
    assert!(text.ends_with('\n'), "the other has gone: {text:?}");
    text.trim_end().to_owned()
}

/// Each counter of `ip_rcv` that the next test looks at.
fn counters(account: &SpanLedger) -> [u64; 4] {
    let dropped = account.ring_dropped + account.channel_dropped;
    [account.started + account.missed, account.delivered, dropped, account.completed]
}

fn numbers<const N: usize>(text: &str) -> [u64; N] {
    let numbers: Vec<u64> = text.split(' ').map(|number| number.parse().expect(text)).collect();
    numbers.try_into().expect("so many")
}

/// A process whose threads are stopped reads nothing: its rings fill up, and what finds them full is counted, to the last
/// packet. Once it goes on, so do its events. A call that lasts over the stop takes as long as it does, and one of the
/// stopped process ends as it stops and begins anew.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn stopped_and_continued() {
    const MEANWHILE: u64 = 3_000;
    let mut other = Forked::begin(|mut line| {
        let builder = LatencyProbe::builder().function("ip_rcv").function("inet_csk_accept").ring_bytes(64 << 10);
        let probe = builder.attach().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = thread::spawn(move || drop(listener.accept().unwrap()));
        eventually("it accepts", || probe.ledger().spans[1].open == 1);
        say(&line, &address.to_string());
        while hear(&mut line) != "stop" {
            let [a, b, c, d] = counters(&probe.ledger().spans[0]);
            say(&line, &format!("{a} {b} {c} {d}"));
        }
        accepting.join().unwrap();
        let (events, ledger) = finish(probe);
        let [a, b, c, d] = counters(&ledger.spans[0]);
        say(&line, &format!("{a} {b} {c} {d}"));
        // What the test's connections themselves are.
        let accepts = events.iter().filter(|event| event.span == "inet_csk_accept");
        let accepts: Vec<_> = accepts
            .map(|event| format!("{} {} {}", event.pid, event.start.as_nanos(), event.end().as_nanos()))
            .collect();
        say(&line, &accepts.join(","));
    });
    let its_address: SocketAddr = other.hear().parse().unwrap();
    let socket = udp_to_itself();
    ping_pong(&socket, 100, b"x");
    eventually("all are delivered", || numbers(&other.ask("?")) == [100, 100, 0, 100]);

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own_address = listener.local_addr().unwrap();
    let accepting = thread::spawn(move || {
        let before = MonotonicTime::now();
        listener.accept().unwrap();
        (before.as_nanos(), MonotonicTime::now().as_nanos())
    });
    thread::sleep(ms(200));
    let stopping = MonotonicTime::now().as_nanos();
    other.signal("STOP");
    let state = format!("/proc/{}/stat", other.process);
    eventually("it has stopped", || fs::read_to_string(&state).unwrap().contains(") T "));
    thread::sleep(ms(100));
    let stopped = MonotonicTime::now().as_nanos();
    ping_pong(&socket, MEANWHILE as usize, b"x");
    let going_on = MonotonicTime::now().as_nanos();
    other.signal("CONT");
    let mut after = [0; 4];
    eventually("what there was room for is delivered", || {
        after = numbers(&other.ask("?"));
        after[1] + after[2] == 100 + MEANWHILE
    });
    assert!(after[1] > 100 && after[2] > 1_000, "{after:?}");
    ping_pong(&socket, 50, b"x");
    eventually("events go on", || numbers::<4>(&other.ask("?"))[1] == after[1] + 50);

    drop((TcpStream::connect(own_address).unwrap(), TcpStream::connect(its_address).unwrap()));
    let window = accepting.join().unwrap();
    let [started, delivered, dropped, completed] = numbers(&other.ask("stop"));
    assert_eq!((started, delivered + dropped), (completed, completed));
    // And the packets of the two connections.
    assert!((4..40).contains(&(completed - 150 - MEANWHILE)), "{completed}");
    assert!(dropped >= after[2], "{dropped}");

    let text = other.hear();
    let accepts: Vec<[u64; 3]> = text.split(',').map(numbers).collect();
    let of =
        |process: u64| accepts.iter().filter(move |accept| accept[0] == process).map(|&[_, start, end]| (start, end));
    let own: Vec<_> = of(std::process::id().into()).collect();
    let [(start, end)] = own[..] else { panic!("{own:?}") };
    assert!(window.0 <= start && end <= window.1 && start < stopping && end > going_on, "{own:?} in {window:?}");
    let its: Vec<_> = of(other.process as u64).collect();
    let [(first, broken_off), (again, last)] = its[..] else { panic!("{its:?}") };
    assert!(first < stopping && (stopping..stopped).contains(&broken_off), "{its:?} {stopping}..{stopped}");
    assert!(again > going_on && last > again, "{its:?} {going_on}");
    assert_eq!(other.end(), 0);
}

/// The wall clock is set by hours, there and back, while calls wait and packets pass: each latency is within the time that
/// its own call took.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn the_clock_is_set() {
    let probe = probe(&["udp_recvmsg", "ip_rcv"]);
    let mut windows = Vec::new();
    let socket = udp_to_itself();
    for seconds in [7_200, -10_800, -86_400 * 400, 86_400 * 400, 3_600] {
        let before = MonotonicTime::now();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| socket.recv(&mut [0; 8]).unwrap());
            eventually("it waits", || probe.ledger().spans[0].open == 1);
            run(&format!("date -s @$(( $(date +%s) + {seconds} ))"));
            thread::sleep(ms(100));
            socket.send(b"go").unwrap();
            waiting.join().unwrap()
        });
        windows.push((before, MonotonicTime::now()));
        let wall = MonotonicTime::now().to_system_time();
        assert!(wall.elapsed().unwrap_or_default() < Duration::from_secs(60), "the conversion is of the present");
    }
    let (events, ledger) = finish(probe);
    assert!(ledger.spans.iter().all(SpanLedger::is_lossless), "{ledger}");
    let of = |span: &'static str| events.iter().filter(move |event| event.span == span);
    assert_eq!((of("udp_recvmsg").count(), of("ip_rcv").count()), (windows.len(), windows.len()), "{ledger}");
    for (event, (before, after)) in of("udp_recvmsg").zip(&windows).chain(of("ip_rcv").zip(&windows)) {
        assert!(event.start >= *before && event.end() <= *after, "{event} within {before:?} and {after:?}");
        assert!(event.span != "udp_recvmsg" || event.latency >= ms(100), "{event}");
    }
}

/// Others trace the same function, by a kprobe and by the function tracer, and a second process attaches and detaches its
/// own probe all the time: what is called is seen, or counted as missed.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn others_trace_the_same() {
    const TRACING: &str = "/sys/kernel/tracing";
    const FEWEST: u64 = 2_000;
    let set = |file: &str, text: &str| {
        fs::write(format!("{TRACING}/{file}"), text).unwrap_or_else(|error| panic!("{text} to {file}: {error}"));
    };
    for &pairing in pairings() {
        let mut other = Forked::begin(|mut line| {
            say(&line, "here");
            line.get_ref().set_nonblocking(true).unwrap();
            let mut turns = 0;
            while line.fill_buf().is_err() {
                let (_, ledger) = finish(probe(&["ip_rcv"]));
                assert!(ledger.is_balanced(), "{ledger}");
                turns += 1;
            }
            say(&line, &turns.to_string());
        });
        other.hear();
        let probe = attach_paired(LatencyProbe::builder().function("ip_rcv").channel_capacity(1 << 18), pairing);
        let (done, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let begin = MonotonicTime::now();
        thread::scope(|scope| {
            let _stop = SetOnDrop(&done);
            for _ in 0..2 {
                scope.spawn(|| {
                    others_first();
                    let socket = udp_to_itself();
                    while !done.load(Ordering::Relaxed) {
                        ping_pong(&socket, 20, b"x");
                        sent.fetch_add(20, Ordering::Relaxed);
                    }
                });
            }
            for turn in 1..=2 {
                set("kprobe_events", "p:dwell_other ip_rcv");
                set("events/kprobes/dwell_other/enable", "1");
                set("set_ftrace_filter", "ip_rcv");
                set("current_tracer", "function");
                thread::sleep(ms(300));
                set("current_tracer", "nop");
                set("set_ftrace_filter", "");
                set("events/kprobes/dwell_other/enable", "0");
                // To open it for that empties it.
                set("kprobe_events", "");
                eventually("packets pass", || sent.load(Ordering::Relaxed) > turn * FEWEST / 2);
            }
        });
        let turns: u64 = other.ask("enough").parse().unwrap();
        let (events, ledger) = finish(probe);
        let took = MonotonicTime::now().as_nanos() - begin.as_nanos();
        println!("{turns} probes of another, {ledger}");
        assert_eq!(other.end(), 0);
        assert!(turns >= 2, "{turns}");
        let account = only(&ledger);
        assert_eq!(account.started + account.missed, sent.into_inner(), "{account}");
        assert_eq!((account.ring_dropped, account.channel_dropped, account.untracked), (0, 0, 0), "{account}");
        assert_eq!(events.len() as u64, account.delivered, "{account}");
        // Calls in flight may skip their exit as others attach or detach; that is all.
        assert!(account.completed + 4 * (turns + 4) + account.missed_exits >= account.started, "{account}");
        assert!(events.iter().all(|event| event.latency.as_nanos() < took.into()), "{account}");
    }
}

/// A module that isn't loaded is named, and waited for; one that is measured can't be unloaded, and when it has been, and is
/// back, a new probe measures it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn modules_come_and_go() {
    const FUNCTION: &str = "dummy:dummy_xmit";
    let _ = shell("rmmod dummy");
    eventually("no test uses the module", || !fs::exists("/sys/module/dummy").unwrap());
    let missing = |builder: dwell::LatencyProbeBuilder| {
        let error = builder.attach().unwrap_err();
        assert_eq!(error.missing_module(), Some("dummy"), "{error}");
    };
    let wanted = || LatencyProbe::builder().function(FUNCTION);
    missing(wanted());
    let began = MonotonicTime::now();
    missing(wanted().wait_for_modules(ms(300)));
    assert!(MonotonicTime::now().as_nanos() - began.as_nanos() >= 300_000_000);
    let among = wanted().function("ip_rcv").best_effort().wait_for_modules(ms(100)).attach().unwrap();
    assert_eq!(among.failures()[0].error.missing_module(), Some("dummy"));
    assert_eq!((among.spans().len(), &*among.failures()[0].span), (1, FUNCTION));

    let loading = thread::spawn(|| {
        thread::sleep(ms(300));
        run("modprobe dummy");
    });
    let waited = wanted().wait_for_modules(PATIENCE).attach();
    loading.join().unwrap();
    if kernel_version() < (5, 11) {
        let error = waited.unwrap_err();
        let ErrorKind::NotTraceable { reason: NotTraceable::ModuleWithoutBtf { module, .. }, .. } = error.kind() else {
            panic!("{error}");
        };
        assert_eq!(module, "dummy");
        run("rmmod dummy");
        return;
    }
    let waited = waited.unwrap();
    send_through_dummy(20);
    assert!(!shell("rmmod dummy").status.success(), "a module that is measured was unloaded");
    send_through_dummy(20);
    let (events, ledger) = finish(waited);
    assert!(only(&ledger).is_lossless(), "{ledger}");
    assert_eq!(by_this_process(&events), 40, "{ledger}");

    eventually("the module can go", || shell("rmmod dummy").status.success());
    missing(wanted());
    run("modprobe dummy");
    let again = wanted().attach().unwrap();
    send_through_dummy(20);
    let (events, ledger) = finish(again);
    assert_eq!(by_this_process(&events), 20, "{ledger}");
    // The one that was there all the time has seen none of that.
    assert!(among.stop().is_balanced());
    eventually("the module can go", || shell("rmmod dummy").status.success());
}

/// Datagrams out of a device of that module, which exists no longer than that.
fn send_through_dummy(count: usize) {
    run("ip link add gone0 type dummy && ip link set gone0 up && ip addr add 10.98.0.1/24 dev gone0");
    run("ip neigh add 10.98.0.2 lladdr 02:00:00:00:00:02 dev gone0");
    let socket = UdpSocket::bind("10.98.0.1:0").unwrap();
    for _ in 0..count {
        socket.send_to(b"out", "10.98.0.2:9").unwrap();
    }
    drop(socket);
    run("ip link del gone0");
}

/// The device announces itself besides, from the kernel's threads or its commands.
fn by_this_process(events: &[LatencyEvent]) -> usize {
    events.iter().filter(|event| event.pid == std::process::id()).count()
}

/// A CPU goes and comes back under load, while its ring is read: every call is an event.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn cpus_come_and_go() {
    const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";
    for &pairing in pairings() {
        let builder = LatencyProbe::builder().function("ip_rcv").channel_capacity(1 << 18).ring_bytes(16 << 20);
        let probe = attach_paired(builder, pairing);
        let (done, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let _stop = SetOnDrop(&done);
            ping_pong_until(scope, &done, &sent);
            for online in ["0", "1", "0", "1"] {
                fs::write(ONLINE, online).unwrap_or_else(|error| panic!("{ONLINE}: {error}"));
                let so_far = sent.load(Ordering::Relaxed);
                eventually("calls go on", || sent.load(Ordering::Relaxed) > so_far + 200);
            }
        });
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        let sent = sent.into_inner();
        assert_eq!((account.started, account.delivered, events.len() as u64), (sent, sent, sent), "{account}");
        assert!(account.is_lossless() && account.open == 0, "{account}");
        assert!([0, 1].iter().all(|cpu| events.iter().any(|event| event.cpu_end == *cpu)), "{account}");
    }
}

/// Killed under load, at any moment, be it while many functions are being attached, a process leaves nothing attached.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn killed_at_any_moment() {
    let functions = ["ip_rcv", "ip_output", "udp_sendmsg", "udp_recvmsg", "tcp_sendmsg", "tcp_v4_rcv"];
    until_bpf_is_gone();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = SetOnDrop(&done);
        scope.spawn(|| {
            others_first();
            let socket = udp_to_itself();
            while !done.load(Ordering::Relaxed) {
                ping_pong(&socket, 10, b"x");
                thread::sleep(ms(1));
            }
        });
        // Of programs, maps and links: before the first is loaded, when one is attached, and when all are.
        for [programs, maps, links] in [[0, 1, 0], [1, 1, 1], [6, 1, 6]] {
            let mut command = Command::new(example("watch"));
            command.arg("--function").args(functions).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().unwrap();
            eventually("it has come that far", || {
                let now = bpf_objects();
                now[0] >= programs && now[1] >= maps && now[2] >= links
            });
            child.kill().unwrap();
            child.wait().unwrap();
            until_bpf_is_gone();
        }
    });
}

/// A probe that is leaked goes with its process.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn leaked() {
    until_bpf_is_gone();
    let mut other = Forked::begin(|mut line| {
        std::mem::forget(probe(&["ip_rcv"]));
        say(&line, "leaked");
        hear(&mut line);
    });
    other.hear();
    assert!(bpf_objects().iter().all(|count| *count > 0));
    say(&other.line, "exit");
    assert_eq!(other.end(), 0);
    until_bpf_is_gone();
}

/// A copy that fork made may drop a probe that it has inherited: its parent's goes on, and goes with the parent alone.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn inherited() {
    until_bpf_is_gone();
    let mut parents = Some(probe(&["ip_rcv"]));
    let mut other = Forked::begin(|mut line| {
        drop(parents.take());
        say(&line, "dropped");
        hear(&mut line);
    });
    other.hear();
    ping_pong(&udp_to_itself(), 100, b"x");
    let (events, ledger) = finish(parents.unwrap());
    assert_eq!(events.len(), 100, "{ledger}");
    let [_, _, links] = bpf_objects();
    assert_eq!(links, 0, "the copy keeps it attached");
    say(&other.line, "exit");
    assert_eq!(other.end(), 0);
    until_bpf_is_gone();
}

/// Processes of many threads, all asleep in the function, are killed: each call returns, with an error, once.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn killed_by_the_hundred() {
    const THREADS: usize = 100;
    const TIMES: usize = 4;
    for &pairing in pairings() {
        let probe = attach_paired(LatencyProbe::builder().function("udp_recvmsg"), pairing);
        let begin = MonotonicTime::now();
        let account = || only(&probe.ledger()).clone();
        for n in 1..=TIMES {
            // Of those before.
            let exits = account().missed_exits;
            let other = Forked::begin(|mut line| {
                for _ in 0..THREADS {
                    let wait = || udp_to_itself().recv(&mut [0; 8]);
                    thread::Builder::new().stack_size(64 << 10).spawn(wait).expect("a thread");
                }
                hear(&mut line);
            });
            eventually("all of them wait", || {
                let account = account();
                // None has returned, so what is skipped now is an entry: of sessions that isn't told apart sooner.
                let missed = account.missed + account.missed_exits.saturating_sub(exits);
                account.started + missed >= (n * THREADS) as u64
            });
            other.signal("KILL");
            assert_eq!(other.end(), 9);
            eventually("all have returned", || {
                let account = account();
                account.open <= account.missed_exits && account.started + account.missed == (n * THREADS) as u64
            });
        }
        let longest = MonotonicTime::now().as_nanos() - begin.as_nanos();
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        println!("{account}");
        assert!(account.missed + account.missed_exits > 0 || account.open == 0, "{account}");
        assert_eq!((account.untracked, account.ring_dropped + account.channel_dropped), (0, 0), "{account}");
        let lost = account.missed + account.missed_exits + account.mismatched + account.withheld;
        assert!(events.len() as u64 + 2 * lost >= (TIMES * THREADS) as u64, "{account}");
        assert!(events.iter().all(|event| event.ret == Some(-4)), "not EINTR: {account}");
        assert!(events.iter().all(|event| event.latency.as_nanos() < longest.into()), "{account}");
    }
}

/// All CPUs send and receive as fast as they can, and every function on the way is measured, one of them called by others
/// all the time: at rest each call is explained.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn load_on_all_cpus() {
    const EACH: usize = 4_000;
    const THREADS: usize = 4;
    for &pairing in pairings() {
        let names = ["ip_output", "ip_rcv", "__alloc_skb"];
        let builder = names.iter().fold(LatencyProbe::builder(), |builder, name| builder.function(*name));
        let probe = attach_paired(builder, pairing);
        let begin = MonotonicTime::now();
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| ping_pong(&udp_to_itself(), EACH, &[0; 500]));
            }
        });
        let took = MonotonicTime::now().as_nanos() - begin.as_nanos();
        let longest: Vec<_> = names.iter().map(|name| probe.histogram(name).unwrap().max()).collect();
        let (events, ledger) = finish(probe);
        println!("{ledger}");
        for account in &ledger.spans {
            let calls = account.started + account.missed;
            let expected = (THREADS * EACH) as u64;
            let others = account.span == "__alloc_skb";
            assert!(calls == expected || others && calls > expected, "{account}");
            // What has begun and not ended was lost by what the kernel skipped, and by nothing else.
            let explained = account.missed + account.missed_exits + account.untracked;
            assert!(account.completed + account.doubtful + account.open + explained >= account.started, "{account}");
            assert!(account.open <= account.missed_exits, "{account}");
            assert!(account.missed + account.missed_exits > 0 || account.completed == account.started, "{account}");
        }
        assert!(events.iter().all(|event| event.latency.as_nanos() < took.into()), "{ledger}");
        assert!(longest.iter().flatten().all(|latency| latency.as_nanos() < u128::from(took) * 2), "{longest:?}");
    }
}
