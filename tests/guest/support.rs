//! Traffic, waiting and the guest's tools.

use std::io;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

use dwell::{LatencyEvent, LatencyProbe, LatencyProbeBuilder, Ledger, Pairing, SpanLedger};
use libbpf_rs::query::{LinkInfoIter, MapInfoIter, ProgInfoIter};

/// Longer than anything here takes on the slowest emulated machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// A socket connected to itself, whose datagrams come back over the loopback device.
pub fn udp_to_itself() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    socket.connect(socket.local_addr().expect("it is bound")).expect("loopback is up");
    socket.set_read_timeout(Some(PATIENCE)).expect("any timeout goes");
    socket
}

/// Sends and receives datagrams one by one.
pub fn ping_pong(socket: &UdpSocket, count: usize, payload: &[u8]) {
    let mut buffer = vec![0; payload.len() + 1];
    for _ in 0..count {
        assert_eq!(socket.send(payload).expect("sent"), payload.len());
        assert_eq!(socket.recv(&mut buffer).expect("received"), payload.len());
    }
}

/// Two threads that send and receive datagrams until `done`, and count them.
pub fn ping_pong_until<'scope>(scope: &'scope Scope<'scope, '_>, done: &'scope AtomicBool, sent: &'scope AtomicU64) {
    for _ in 0..2 {
        scope.spawn(|| {
            let socket = udp_to_itself();
            while !done.load(Ordering::Relaxed) {
                ping_pong(&socket, 50, b"x");
                sent.fetch_add(50, Ordering::Relaxed);
            }
        });
    }
}

/// A probe of these functions.
pub fn probe(functions: &[&str]) -> LatencyProbe {
    let builder = functions.iter().fold(LatencyProbe::builder(), |builder, function| builder.function(*function));
    builder.attach().unwrap_or_else(|error| panic!("{functions:?}: {error}"))
}

/// The ways in which this kernel can pair calls, the one that it takes by itself first.
pub fn pairings() -> &'static [Pairing] {
    if has_sessions() { &[Pairing::Session, Pairing::Frame] } else { &[Pairing::Frame] }
}

/// Whether calls are paired by sessions, unless something speaks against it.
pub fn has_sessions() -> bool {
    kernel_version() >= (7, 0)
}

/// Whether functions can be traced at all.
pub fn has_trampolines() -> bool {
    by_architecture(true, kernel_version() >= (6, 4))
}

/// Attaches with all calls paired this way.
#[track_caller]
pub fn attach_paired(builder: LatencyProbeBuilder, pairing: Pairing) -> LatencyProbe {
    let builder = if pairing == Pairing::Frame { builder.frames() } else { builder };
    let probe = builder.attach().unwrap_or_else(|error| panic!("{error}"));
    for span in probe.spans() {
        assert_eq!(span.pairing, pairing, "{}", span.name);
    }
    probe
}

/// Stops the probe; what it had to say, and its last ledger, which must add up.
pub fn finish(probe: LatencyProbe) -> (Vec<LatencyEvent>, Ledger) {
    let events = probe.events().clone();
    let ledger = probe.stop();
    assert!(ledger.is_balanced(), "it doesn't add up: {ledger}");
    let events: Vec<_> = events.into_iter().collect();
    (events, ledger)
}

/// The ledger's only span.
#[track_caller]
pub fn only(ledger: &Ledger) -> &SpanLedger {
    assert_eq!(ledger.spans.len(), 1);
    &ledger.spans[0]
}

/// Waits for something to become true.
#[track_caller]
pub fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(ms(5));
    }
}

/// How many programs, maps and links of BPF the kernel has.
pub fn bpf_objects() -> [usize; 3] {
    [ProgInfoIter::default().count(), MapInfoIter::default().count(), LinkInfoIter::default().count()]
}

/// Waits until the kernel has nothing of BPF: it frees what a test had a moment after the last descriptor is closed, maybe
/// during the next test.
#[track_caller]
pub fn until_bpf_is_gone() {
    eventually("no program, map or link is left", || bpf_objects() == [0; 3]);
}

/// Sets a flag once it goes, also when a test fails: threads that run until then would keep the test from ending.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs a command of the guest, which must succeed.
#[track_caller]
pub fn run(command: &str) -> String {
    let output = shell(command);
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command}: {} {stdout} {stderr}", output.status);
    stdout.into_owned()
}

/// Runs a command of the guest.
#[track_caller]
pub fn shell(command: &str) -> Output {
    Command::new("sh").arg("-c").arg(command).output().unwrap_or_else(|error| panic!("{command}: {error}"))
}

/// One of the examples, beside this test's own binary.
pub fn example(name: &str) -> PathBuf {
    let this = std::env::current_exe().expect("/proc is mounted");
    let profile = this.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    profile.join("examples").join(name)
}

/// The running kernel's version, as a pair: only to say what a kernel of that version is known to lack.
pub fn kernel_version() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("/proc is mounted");
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().expect("a number"));
    (numbers.next().expect("major"), numbers.next().expect("minor"))
}

/// What differs between the architectures that are tested.
#[track_caller]
pub fn by_architecture<T>(x86_64: T, arm64: T) -> T {
    match std::env::consts::ARCH {
        "x86_64" => x86_64,
        "aarch64" => arm64,
        other => panic!("nobody has said yet what to expect on {other}"),
    }
}

/// Lets the others go first, from a thread that is only there to keep the machine busy: what a test does besides would
/// have little of two emulated CPUs.
pub fn others_first() {
    run(&format!("renice -n 19 -p {}", gettid()));
}

/// The thread's id, as events have it.
pub fn gettid() -> u32 {
    let thread = std::fs::read_link("/proc/thread-self").expect("/proc is mounted");
    thread.file_name().and_then(|id| id.to_str()?.parse().ok()).expect("PID/task/TID")
}

/// Of an odd number.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Datagrams that the thread's host has received and not handed over: for whatever reason, and those of no socket.
pub fn udp_errors() -> Vec<(String, u64)> {
    let counters = std::fs::read_to_string("/proc/thread-self/net/snmp").expect("/proc is mounted");
    let mut lines = counters.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next().expect("the names"), lines.next().expect("the values"));
    let counters = names.split(' ').zip(values.split(' '));
    let errors = counters.filter(|(name, _)| name.ends_with("Errors") || *name == "NoPorts");
    errors.map(|(name, value)| (name.to_owned(), value.parse().expect("a number"))).collect()
}

/// Whether an I/O error says that a read timed out or would have to wait.
pub fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
