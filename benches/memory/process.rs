//! The process that has the probe: a fresh one for each, so that nothing of an earlier one is still there.

use std::error::Error;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, fs, io, thread};

use clap::ValueEnum;
use dwell::{Events, Hook, LatencyProbe, Span};
use serde::{Deserialize, Serialize};

use crate::kernel::{self, Item};

/// What the probe measures; everything else is as it is by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    Function,
    TwoFunctions,
    FunctionWithoutEvents,
    Span,
    TwoSpans,
    SpanWithoutEvents,
}

impl Shape {
    fn attach(self) -> Result<LatencyProbe, dwell::Error> {
        let span = |to: &str| Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint(to));
        let (one, other) = (span("netif_receive_skb"), span("netif_rx"));
        let builder = LatencyProbe::builder();
        match self {
            Self::Function => builder.function("ip_rcv"),
            Self::TwoFunctions => builder.function("ip_rcv").function("udp_rcv"),
            Self::FunctionWithoutEvents => builder.function("ip_rcv").events(Events::None),
            Self::Span => builder.span(one),
            Self::TwoSpans => builder.span(one).span(other),
            Self::SpanWithoutEvents => builder.span(one).events(Events::None),
        }
        .attach()
    }
}

/// What such a process has found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Found {
    pub kernel: Vec<Item>,
    /// Resident before anything was attached, attached, and after events have been read; bytes.
    pub resident: [u64; 3],
    /// The most that was ever resident.
    pub peak: u64,
    /// Spans that were counted, and events that were read.
    pub completed: u64,
    pub events: u64,
}

impl Found {
    /// Bytes in the kernel.
    pub fn in_kernel(&self) -> u64 {
        self.kernel.iter().map(|item| item.bytes).sum()
    }

    /// Of those, what there is for each possible CPU.
    pub fn per_cpu(&self) -> u64 {
        self.kernel.iter().map(|item| item.per_cpu).sum()
    }
}

/// Starts this program again, to have such a probe; in this cgroup, if there is one. The error says what it died of.
pub fn start(shape: Shape, cgroup: Option<&Path>, datagrams: u32) -> Result<Found, Box<dyn Error>> {
    let shape = shape.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let mut command = Command::new(env::current_exe()?);
    command.args(["--shape", &shape, "--datagrams", &datagrams.to_string()]).stderr(Stdio::inherit());
    if let Some(cgroup) = cgroup {
        command.arg("--cgroup").arg(cgroup);
    }
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!("the process with the probe ended by {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// What that process does.
pub fn run(shape: Shape, cgroup: Option<PathBuf>, datagrams: u32) -> Result<(), Box<dyn Error>> {
    if let Some(cgroup) = cgroup {
        fs::write(cgroup.join("cgroup.procs"), "0")?;
    }
    let before = resident()?;
    let probe = shape.attach()?;
    let attached = resident()?;
    let kernel = kernel::items()?;
    let events = probe.events().clone();
    let reader = thread::spawn(move || events.iter().count());
    send(datagrams)?;
    let after = resident()?;
    let completed = probe.stop().spans.iter().map(|span| span.completed).sum();
    let events = reader.join().map_err(|_| "the reader panicked")? as u64;
    let found = Found { kernel, resident: [before, attached, after], peak: status("VmHWM")?, completed, events };
    println!("{}", serde_json::to_string(&found)?);
    Ok(())
}

fn send(datagrams: u32) -> io::Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(socket.local_addr()?)?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut buffer = [0; 64];
    for _ in 0..datagrams {
        socket.send(&[0; 32])?;
        socket.recv(&mut buffer)?;
    }
    Ok(())
}

/// What is resident of this process, in bytes.
fn resident() -> io::Result<u64> {
    status("VmRSS")
}

/// One of the sizes in `/proc/self/status`, in bytes.
fn status(name: &str) -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
