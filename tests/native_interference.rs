//! What a probe that runs for long meets in its own process, on the machine that runs the test: by raw tracepoints, which
//! work also where its kernel refuses fentry. Where it refuses these as well, or the test doesn't run as root, each test says
//! so by name.
#![allow(unsafe_code, reason = "signals, fork and limits, which neither the standard library nor a dependency has")]

mod natively;

use std::any::Any;
use std::ffi::c_int;
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use dwell::{LatencyProbe, LatencyProbeBuilder};
use natively::{ONE_AT_A_TIME, possible, span_across, udp_to_itself};

const SIGUSR1: c_int = 10;
const RLIMIT_NOFILE: c_int = 7;

unsafe extern "C" {
    fn signal(signal: c_int, handler: extern "C" fn(c_int)) -> usize;
    fn siginterrupt(signal: c_int, on: c_int) -> c_int;
    fn tgkill(process: c_int, thread: c_int, signal: c_int) -> c_int;
    fn fork() -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn alarm(seconds: u32) -> u32;
    fn getrlimit(resource: c_int, limits: *mut [u64; 2]) -> c_int;
    fn setrlimit(resource: c_int, limits: *const [u64; 2]) -> c_int;
}

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// The probe; `None` where this machine doesn't allow it, which must be explained.
fn attach(test: &str, builder: LatencyProbeBuilder) -> Option<LatencyProbe> {
    possible(test, builder.attach())
}

/// Datagrams there and back, whatever interrupts it.
fn ping_pong(count: u64) {
    let socket = udp_to_itself(Duration::from_secs(60));
    let whatever_interrupts = |call: &dyn Fn() -> io::Result<usize>| loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other.unwrap(),
        }
    };
    for _ in 0..count {
        whatever_interrupts(&|| socket.send(b"x"));
        whatever_interrupts(&|| socket.recv(&mut [0; 8]));
    }
}

/// The threads of this process.
fn threads() -> Vec<c_int> {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is mounted").flatten();
    tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

/// The threads of the crate.
fn own_threads() -> Vec<c_int> {
    let is_own = |tid: &c_int| {
        fs::read_to_string(format!("/proc/self/task/{tid}/comm")).is_ok_and(|comm| comm.starts_with("dwell-"))
    };
    threads().into_iter().filter(is_own).collect()
}

/// How long the reader has run.
fn reader_time() -> Duration {
    let [reader] = own_threads()[..] else { panic!("there is one reader") };
    let stat = fs::read_to_string(format!("/proc/self/task/{reader}/schedstat")).unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

/// The memory that this process has, in KiB.
fn resident() -> i64 {
    let status = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// What is ours of the descriptors of a process.
fn of_bpf(process: u32) -> Vec<String> {
    let links = fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let targets = links.filter_map(|link| Some(fs::read_link(link.path()).ok()?.to_string_lossy().into_owned()));
    targets.filter(|target| target.starts_with("anon_inode:") || target.contains("dwell")).collect()
}

/// Interrupts all threads of this process as long as it lives, the reader and those that attach included.
struct Rain {
    done: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<u64>>,
}

static CAUGHT: AtomicU64 = AtomicU64::new(0);

extern "C" fn caught(_: c_int) {
    CAUGHT.fetch_add(1, Ordering::Relaxed);
}

impl Rain {
    fn begin() -> Self {
        // SAFETY: the handler does nothing but count, and system calls are to be interrupted by it.
        unsafe {
            signal(SIGUSR1, caught);
            siginterrupt(SIGUSR1, 1);
        }
        let done = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&done);
        let thread = thread::spawn(move || {
            let mut sent = 0;
            while !until.load(Ordering::Relaxed) {
                for tid in threads() {
                    // SAFETY: numbers only; a thread that has ended gets nothing.
                    unsafe { tgkill(std::process::id() as c_int, tid, SIGUSR1) };
                    sent += 1;
                }
                thread::sleep(Duration::from_micros(500));
            }
            sent
        });
        Self { done, thread: Some(thread) }
    }
}

impl Drop for Rain {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        let sent = self.thread.take().unwrap().join();
        println!("{sent:?} signals sent, {} caught", CAUGHT.load(Ordering::Relaxed));
    }
}

/// Signals by the thousand, at each thread, with a handler that interrupts system calls: attaching works, no event is lost,
/// an idle reader doesn't spin, and stopping is prompt.
#[test]
fn signals() {
    const PACKETS: u64 = 10_000;
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let caught_before = CAUGHT.load(Ordering::Relaxed);
    let rain = Rain::begin();
    for _ in 0..3 {
        let Some(probe) = attach("signals", LatencyProbe::builder().span(span_across())) else { return };
        ping_pong(PACKETS);
        thread::sleep(ms(300));
        let (began, before) = (Instant::now(), reader_time());
        thread::sleep(ms(1_000));
        let (idle, ran) = (began.elapsed(), reader_time() - before);
        assert!(ran < idle / 2, "idle, the reader ran for {ran:?} of {idle:?}");
        let events = probe.events().clone();
        let began = Instant::now();
        let ledger = probe.stop();
        let took = began.elapsed();
        println!("ran {ran:?} of {idle:?}, stopped in {took:?}");
        assert!(took < Duration::from_secs(5), "stopping took {took:?}");
        let account = &ledger.spans[0];
        assert!(ledger.is_balanced() && account.is_lossless(), "{ledger}");
        assert!(account.delivered >= PACKETS && account.delivered == events.iter().count() as u64, "{ledger}");
    }
    drop(rain);
    assert!(CAUGHT.load(Ordering::Relaxed) > caught_before + 1_000);
}

/// Runs `work` in a forked copy of this process, which then exits. Whether it came that far, and in time.
fn in_copy(work: impl FnOnce()) -> bool {
    // SAFETY: the copy has this thread only. It runs what the test gives it, and leaves without returning.
    match unsafe { fork() } {
        0 => {
            // SAFETY: a number only. What hangs is ended by the signal.
            unsafe { alarm(20) };
            let clean = catch_unwind(AssertUnwindSafe(work)).is_ok();
            std::process::exit(if clean { 0 } else { 1 });
        }
        child => {
            assert!(child > 0, "{}", io::Error::last_os_error());
            let mut status = -1;
            // SAFETY: a number that outlives the call.
            while unsafe { waitpid(child, &mut status, 0) } == -1 {}
            status == 0
        }
    }
}

/// A copy that fork made may exit, drop the probe or stop it: the parent's goes on.
#[test]
fn forked() {
    const PACKETS: u64 = 200;
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(probe) = attach("forked", LatencyProbe::builder().span(span_across())) else { return };
    let mut probe = Some(probe);
    let mut completed = 0;
    for way in ["exit", "drop", "stop"] {
        let clean = in_copy(|| match way {
            "exit" => {}
            "drop" => drop(probe.take()),
            _ => drop(probe.take().unwrap().stop()),
        });
        assert!(clean, "{way}: the copy hung or failed");
        ping_pong(PACKETS);
        let account = &probe.as_ref().unwrap().ledger().spans[0];
        assert!(account.completed >= completed + PACKETS, "after {way}: {account}");
        completed = account.completed;
    }
    let probe = probe.unwrap();
    let events = probe.events().clone();
    let ledger = probe.stop();
    assert!(ledger.is_balanced() && ledger.spans[0].is_lossless(), "{ledger}");
    assert!(events.iter().count() as u64 >= 3 * PACKETS, "{ledger}");
}

/// Programs that this one starts have none of the probe's descriptors, so that it goes when this one does.
#[test]
fn executed() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = of_bpf(std::process::id());
    let Some(probe) = attach("executed", LatencyProbe::builder().span(span_across()).keep_slowest(3)) else { return };
    let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
    let (own, inherited) = (of_bpf(std::process::id()), of_bpf(child.id()));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(own.len() >= before.len() + 5, "{own:?}");
    assert!(own.iter().any(|target| target.contains("bpf")), "{own:?}");
    assert_eq!(inherited, [""; 0], "of {own:?}");
    drop(probe);
}

/// A thread that panics while it reads takes the probe with it: no thread and no descriptor is left, and nobody waits. Events
/// that nobody wants any more are counted.
#[test]
fn panicking_consumer() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(probe) = attach("panicking_consumer", LatencyProbe::builder().span(span_across()).channel_capacity(50))
    else {
        return;
    };
    drop(probe);
    let held = descriptors();
    let began = Instant::now();
    for in_batches in [false, true] {
        let builder = LatencyProbe::builder().span(span_across()).channel_capacity(50);
        let probe = if in_batches { builder.in_batches(10) } else { builder }.attach().unwrap();
        // Receivers that go are no reason to stop.
        drop((probe.events().clone(), probe.batches().clone()));
        ping_pong(200);
        let consumer = thread::Builder::new().name("consumer".into()).spawn(move || {
            let account = &probe.ledger().spans[0];
            assert!(account.completed >= 200, "{account}");
            if in_batches {
                let batch = probe.batches().recv().unwrap();
                panic!("this is how the test wants it: {}", batch[0]);
            }
            panic!("this is how the test wants it: {}", probe.events().recv().unwrap());
        });
        let panic = consumer.unwrap().join().unwrap_err();
        assert!(panic.downcast_ref::<String>().unwrap().starts_with("this is how"), "{panic:?}");
        assert_eq!(own_threads(), []);
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(descriptors(), held);
}

/// Any struct can keep it, as anything that can be sent, on any thread; and four at once each see every packet.
#[test]
fn four_at_once() {
    const PACKETS: u64 = 1_000;
    struct Agent {
        _name: String,
        probe: Box<dyn Any + Send>,
    }
    fn is_static<T: Send + Sync + 'static>() {}
    is_static::<LatencyProbe>();
    is_static::<dwell::Batches>();

    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut agents = Vec::new();
    for n in 0..4 {
        let Some(probe) = attach("four_at_once", LatencyProbe::builder().span(span_across())) else { return };
        agents.push(Agent { _name: n.to_string(), probe: Box::new(probe) });
    }
    ping_pong(PACKETS);
    for agent in agents {
        let ledger = thread::spawn(move || agent.probe.downcast::<LatencyProbe>().unwrap().stop()).join().unwrap();
        assert!(ledger.is_balanced() && ledger.spans[0].is_lossless(), "{ledger}");
        assert!(ledger.spans[0].delivered >= PACKETS, "{ledger}");
    }
}

/// Fifty spans are attached within seconds, and detached as fast, by stopping as by dropping.
#[test]
fn many_spans() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for stop in [true, false] {
        let builder = (0..50).fold(LatencyProbe::builder(), |builder, n| {
            builder.span(span_across().named(format!("across {n}")).max_age(Duration::from_secs(60 + n)))
        });
        let began = Instant::now();
        let Some(probe) = attach("many_spans", builder) else { return };
        let attached = began.elapsed();
        ping_pong(10);
        let began = Instant::now();
        if stop {
            let ledger = probe.stop();
            assert!(ledger.is_balanced(), "{ledger}");
            assert!(ledger.spans.len() == 50 && ledger.spans.iter().all(|span| span.completed >= 10), "{ledger}");
        } else {
            drop(probe);
        }
        let detached = began.elapsed();
        println!("attached in {attached:?}, detached in {detached:?}");
        // On a quiet machine a tenth of that.
        assert!(attached < Duration::from_secs(20), "attaching took {attached:?}");
        assert!(detached < Duration::from_secs(8), "detaching took {detached:?}");
    }
}

/// What many times take no more of than a few.
#[derive(Debug)]
struct Held {
    descriptors: usize,
    threads: usize,
    kib: i64,
}

impl Held {
    fn now() -> Self {
        Self { descriptors: descriptors(), threads: own_threads().len(), kib: resident() }
    }

    #[track_caller]
    fn assert_like(&self, before: &Self) {
        assert_eq!((self.descriptors, self.threads), (before.descriptors, before.threads));
        println!("{} KiB, {} KiB before", self.kib, before.kib);
        assert!(self.kib < before.kib + 1_024, "{self:?}, before: {before:?}");
    }
}

/// Attached and detached under traffic, 60 times or as often as `DWELL_CYCLES` says: neither memory, nor descriptors, nor
/// threads become more.
#[test]
fn again_and_again() {
    const WARM_UP: usize = 20;
    let cycles = std::env::var("DWELL_CYCLES").map_or(60, |cycles| cycles.parse().expect("a number"));
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = SetOnDrop(&done);
        // One socket for all of it: descriptors are counted meanwhile.
        let socket = udp_to_itself(Duration::from_secs(60));
        scope.spawn(|| {
            let socket = socket;
            while !done.load(Ordering::Relaxed) {
                for _ in 0..10 {
                    socket.send(b"x").unwrap();
                    socket.recv(&mut [0; 8]).unwrap();
                }
                thread::sleep(ms(5));
            }
        });
        let began = Instant::now();
        let mut warm = None;
        for n in 0..cycles {
            let Some(probe) = attach("again_and_again", LatencyProbe::builder().span(span_across())) else { break };
            if n % 2 == 0 {
                drop(probe);
            } else {
                let ledger = probe.stop();
                assert!(ledger.is_balanced(), "{ledger}");
            }
            if n == WARM_UP {
                warm = Some(Held::now());
            }
        }
        println!("{:?}", began.elapsed());
        if let Some(warm) = warm {
            Held::now().assert_like(&warm);
        }
    });
}

/// Sets a flag once it goes, also when a test fails: threads that run until then would keep the test from ending.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Wherever descriptors run out, nothing of what was begun is left, over and over.
#[test]
fn out_of_descriptors() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(probe) = attach("out_of_descriptors", LatencyProbe::builder().span(span_across())) else { return };
    drop(probe);
    let open = descriptors() as u64;
    let mut limits = [0; 2];
    // SAFETY: as large as the C library's, and outlives the call.
    assert_eq!(unsafe { getrlimit(RLIMIT_NOFILE, &mut limits) }, 0);
    let limited = |most| {
        // SAFETY: as above.
        assert_eq!(unsafe { setrlimit(RLIMIT_NOFILE, &[most, limits[1]]) }, 0);
    };
    let (mut failed, mut warm) = (0, None);
    for n in 0..120 {
        limited(open + n % 15);
        let result = LatencyProbe::builder().span(span_across()).attach();
        limited(limits[0]);
        failed += u64::from(result.is_err());
        drop(result);
        if n == 40 {
            warm = Some(Held::now());
        }
    }
    assert!(failed > 80, "only {failed} failed");
    Held::now().assert_like(&warm.unwrap());
}
