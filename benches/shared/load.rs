//! The load, and what it takes.
//!
//! It is a process of its own, with one thread: in the process of a probe, whose reader is another thread, each system
//! call of the load would take longer for that alone.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::UdpSocket;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Makes a process the load.
const ROLE: &str = "DWELL_BENCH_IS_LOAD";

/// Datagrams that a socket sends to itself: for each, `ip_rcv` is called once.
pub struct Loopback {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    pairs: u32,
    runs: usize,
}

/// What one datagram, sent and received, took.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    /// The median of the runs, in nanoseconds; where the clock counts instructions, in instructions.
    pub median: f64,
    /// How far the runs are apart.
    pub spread: f64,
}

impl Loopback {
    /// Measurements are medians of this many runs, of this many datagrams each.
    pub fn start(pairs: u32, runs: usize) -> io::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(orders), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::Error::other("the load has no pipes"));
        };
        Ok(Self { process, orders, answers: BufReader::new(answers), pairs, runs })
    }

    /// Datagrams of one [`measure`](Self::measure).
    pub fn total(&self) -> u64 {
        u64::from(self.pairs) * (self.runs as u64 + 1)
    }

    /// The first run is not counted: caches of the kernel, and of the emulator, fill in it.
    pub fn measure(&mut self) -> io::Result<Taken> {
        self.run()?;
        let mut times = (0..self.runs).map(|_| self.run()).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f64::total_cmp);
        Ok(Taken { median: times[times.len() / 2], spread: times[times.len() - 1] - times[0] })
    }

    fn run(&mut self) -> io::Result<f64> {
        writeln!(self.orders, "{}", self.pairs)?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let nanoseconds: f64 = answer.trim().parse().map_err(io::Error::other)?;
        Ok(nanoseconds / f64::from(self.pairs))
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Is this process the load? Then it has been that until now, and should end.
pub fn was_load() -> io::Result<bool> {
    if std::env::var_os(ROLE).is_none() {
        return Ok(false);
    }
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(socket.local_addr()?)?;
    // Nothing is lost on the loopback device; if it were, the run would fail and not hang.
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut buffer = [0; 64];
    for order in io::stdin().lines() {
        let pairs: u32 = order?.parse().map_err(io::Error::other)?;
        let begin = Instant::now();
        for _ in 0..pairs {
            socket.send(&[0; 32])?;
            socket.recv(&mut buffer)?;
        }
        println!("{}", begin.elapsed().as_nanos());
    }
    Ok(true)
}
