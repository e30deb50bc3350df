//! Other tools, which run beside the load as processes of their own.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::query::LinkInfoIter;

/// Compiling a script takes some ten thousand million instructions.
const LONGEST_START: Duration = Duration::from_secs(180);
/// Nothing is attached any more, or prepared, when it has been quiet for as long.
const QUIET: Duration = Duration::from_secs(2);

/// By what to know that a tool is measuring.
#[derive(Debug, Clone, Copy)]
pub enum Sign {
    /// It has attached BPF programs.
    Links,
    /// It has ftrace trace.
    Ftrace,
}

/// A tool that is measuring.
pub struct Peer {
    child: Child,
}

impl Peer {
    /// Starts `DIR/run`, as `scripts/peers` makes it, and returns once it measures.
    pub fn start(tool: &Path, arguments: &[&str], sign: Sign) -> Result<Self, String> {
        let before = links();
        let child = Command::new(tool.join("run"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", tool.display()))?;
        let mut peer = Self { child };
        let begin = Instant::now();
        let mut last = (before, Instant::now());
        loop {
            thread::sleep(Duration::from_millis(200));
            if peer.child.try_wait().is_ok_and(|status| status.is_some()) {
                let output = peer.child.wait_with_output().map_err(|error| error.to_string())?;
                return Err(format!("it ended at once: {}", last_words(&output)));
            }
            let links = links();
            if links != last.0 {
                last = (links, Instant::now());
            }
            let measures = match sign {
                Sign::Links => links > before,
                Sign::Ftrace => ftrace_is_on(),
            };
            if !measures {
                last.1 = Instant::now();
            }
            if measures && last.1.elapsed() >= QUIET {
                return Ok(peer);
            }
            if begin.elapsed() > LONGEST_START {
                let output = peer.end()?;
                return Err(format!("it has attached nothing in {LONGEST_START:?}: {}", last_words(&output)));
            }
        }
    }

    /// Ends it as Ctrl-C does; what it has to say then.
    pub fn stop(self) -> Result<String, String> {
        let output = self.end()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn end(self) -> Result<Output, String> {
        let told = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status();
        told.map_err(|error| format!("cannot run kill: {error}"))?;
        self.child.wait_with_output().map_err(|error| error.to_string())
    }
}

/// Calls in a histogram of `funclatency`: `1024 -> 2047 : 20000 |****|`.
pub fn funclatency_calls(output: &str) -> u64 {
    let rows = output.lines().filter(|line| line.contains("->"));
    rows.filter_map(|row| first_number(row.split_once(':')?.1)).sum()
}

/// Calls in a histogram of `perf ftrace latency`: `1 - 2 us | 20000 | #### |`.
pub fn perf_calls(output: &str) -> u64 {
    output.lines().filter_map(|row| first_number(row.split('|').nth(1)?)).sum()
}

/// Calls in the histograms of `bpftrace -f json`, a line each.
pub fn bpftrace_calls(output: &str) -> u64 {
    let values = output.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let histograms = values.filter(|value| value["type"] == "hist");
    let maps = histograms.filter_map(|value| value["data"].as_object().cloned()).flatten();
    let counts = maps.filter_map(|(_, buckets)| {
        Some(buckets.as_array()?.iter().filter_map(|bucket| bucket["count"].as_u64()).sum::<u64>())
    });
    counts.sum()
}

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

fn links() -> usize {
    LinkInfoIter::default().count()
}

/// perf makes an instance of its own.
fn ftrace_is_on() -> bool {
    let instances = fs::read_dir("/sys/kernel/tracing/instances").into_iter().flatten().flatten();
    instances.map(|instance| instance.path()).any(|instance| {
        let read = |file: &str| fs::read_to_string(instance.join(file)).unwrap_or_default();
        read("current_tracer").trim() == "function_graph" && read("tracing_on").trim() == "1"
    })
}

fn last_words(output: &Output) -> String {
    let all = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = all.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join("; ")
}
