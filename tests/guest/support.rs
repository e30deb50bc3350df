//! Traffic, waiting and the guest's tools.

use std::io;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dwell::{LatencyEvent, LatencyProbe, Ledger, SpanLedger};

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

/// A probe of these functions.
pub fn probe(functions: &[&str]) -> LatencyProbe {
    let builder = functions.iter().fold(LatencyProbe::builder(), |builder, function| builder.function(*function));
    builder.attach().unwrap_or_else(|error| panic!("{functions:?}: {error}"))
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

/// The thread's id, as events have it.
pub fn gettid() -> u32 {
    let thread = std::fs::read_link("/proc/thread-self").expect("/proc is mounted");
    thread.file_name().and_then(|id| id.to_str()?.parse().ok()).expect("PID/task/TID")
}

/// Whether an I/O error says that a read timed out or would have to wait.
pub fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
