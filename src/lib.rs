//! How long packets dwell in the Linux network stack: exact latencies of kernel functions, as histograms and typed events.
//!
//! When network latency is high, the delay is often inside the kernel: firewall rules, queues, scheduling. This crate
//! attaches eBPF programs to the kernel functions that a program names, and counts in the kernel how long their calls
//! take:
//!
//! ```no_run
//! use std::time::Duration;
//! use dwell::{Events, LatencyProbe};
//!
//! let probe = LatencyProbe::builder().function("ip_rcv").events(Events::None).attach()?;
//! std::thread::sleep(Duration::from_secs(10));
//! let histogram = probe.histogram("ip_rcv")?;
//! println!("{} calls, p99 {:?}, longest {:?}", histogram.count(), histogram.quantile(0.99), histogram.max());
//! println!("{histogram:#}");                   // a line for each power of two
//! # Ok::<(), dwell::Error>(())
//! ```
//!
//! And it hands over each call: how long it took, on which CPU, in which thread, with which packet, and what it returned.
//! The traffic isn't touched.
//!
//! ```no_run
//! use dwell::LatencyProbe;
//!
//! let probe = LatencyProbe::builder().function("ip_rcv").attach()?;
//! for event in probe.events().iter().take(1_000) {
//!     println!("{event}");                     // ip_rcv 1.824µs curl/4711 cpu 2 ret 0 skb 0xffff... len 60
//! }
//! println!("{}", probe.stop());                // ip_rcv: started 1000 completed 1000 delivered 1000
//! # Ok::<(), dwell::Error>(())
//! ```
//!
//! # From one point to another
//!
//! A [`Span`] goes from one [`Hook`] to another: entries and exits of functions and raw tracepoints, in any mixture. What
//! belongs together is said by a [`Key`]: the packet, its data, its socket, its flow, the thread. A [`Stage`] is a
//! ready-made span by name, whatever its functions are called in this kernel.
//!
//! ```no_run
//! use std::time::Duration;
//! use dwell::{Hook, Key, LatencyProbe, Outcome, Span, Stage};
//!
//! let received = Span::between(Hook::tracepoint("netif_receive_skb"), Hook::entry("tcp_v4_rcv"));
//! let probe = LatencyProbe::builder()
//!     .span(received.keyed_by(Key::Skb).named("received").max_age(Duration::from_secs(5)).with_abandoned())
//!     .stage(Stage::FirewallRules)
//!     .stage(Stage::SocketQueue)
//!     .best_effort()                           // a stage that can't be had here leaves the others running
//!     .attach()?;
//! for failure in probe.failures() {
//!     eprintln!("{failure}");
//! }
//! for event in probe.events() {
//!     match &event.outcome {
//!         Outcome::Completed => println!("{} took {:?}", event.span, event.latency),
//!         gone => println!("{gone} after {:?}", event.latency),
//!     }
//! }
//! # Ok::<(), dwell::Error>(())
//! ```
//!
//! # What it promises
//!
//! **A latency is that of one call, or it isn't reported.** Entry and exit are matched by the address of the call's own
//! trampoline frame, which no two calls in flight share. So recursion, a softirq that runs the same function on top of
//! itself, idle CPUs (all of which are pid 0), sleeping, and migration between CPUs don't confuse it. What the kernel
//! keeps from the probe is counted, and where that leaves a doubt about a pair, the pair is dropped and counted.
//!
//! **An address that is used again is another packet.** Spans between hooks are told when their packet, socket or thread
//! goes, so that what comes after it doesn't meet an old start. Where a kernel doesn't let that be seen, the span says so
//! ([`SpanInfo::lives_are_seen`]).
//!
//! **What isn't certain is taken back.** Where the kernel has skipped programs, pairs that may not belong together are
//! taken out of the histogram and counted as [`doubtful`](SpanLedger::doubtful), and no event is made of them. On kernels
//! with [sessions](Pairing::Session) there are none.
//!
//! **Nothing is lost silently.** The [`Ledger`] accounts for every call of every function, and its sums can be checked.
//!
//! **Errors explain.** A misspelt function comes back with near names, a function that can't be traced with the
//! reason, a missing capability by its name; quickly, and with nothing left attached. See [`ErrorKind`].
//!
//! **It keeps out of the way.** It never prints, never panics, never blocks the kernel, and waits for nobody: a program
//! that reads too slowly loses events, which are counted, and nothing else.
//!
//! # Histograms
//!
//! Every span has one, whether it has events or not: [`LatencyProbe::histogram`]. It is counted in the kernel, and read
//! only when it is asked for. A [`Histogram`] is a snapshot that resets nothing; what came between two of them is
//! [`Histogram::since`], and [`Histogram::merge`] puts those of several spans or probes together. With [`Span::grouped_by`]
//! there is one for each CPU, interface, protocol or local port.
//!
//! ```no_run
//! use std::time::Duration;
//! use dwell::{Events, GroupBy, Histogram, LatencyProbe, Span};
//!
//! let span = Span::function("ip_rcv").grouped_by(GroupBy::Interface);
//! let probe = LatencyProbe::builder().span(span).events(Events::None).attach()?;
//! let mut earlier = Histogram::new();
//! for _ in 0..60 {
//!     std::thread::sleep(Duration::from_secs(1));
//!     let now = probe.histogram("ip_rcv")?;
//!     println!("{}", now.since(&earlier));     // n 1000 mean 1.20µs min 512ns p50 1.08µs p90 1.98µs ...
//!     earlier = now;
//! }
//! for (interface, histogram) in probe.groups("ip_rcv")?.groups {
//!     println!("{interface}: {histogram}");    // interface 2: n 59874 mean 1.21µs ...
//! }
//! # Ok::<(), dwell::Error>(())
//! ```
//!
//! # What it costs
//!
//! Every packet pays for a probe, and the less is asked for, the less it pays. [`Events`] says what becomes an event; it is
//! decided in the kernel, before anything is written. Without events there is neither a ring nor a thread.
//!
//! ```no_run
//! use std::time::Duration;
//! use dwell::{Events, LatencyProbe, Span};
//!
//! let probe = LatencyProbe::builder()
//!     .span(Span::function("ip_rcv").events(Events::None))
//!     .span(Span::function("tcp_v4_rcv").events(Events::OneIn(1_000)))
//!     .function("udp_recvmsg")
//!     .min_latency(Duration::from_millis(5))   // for spans that don't say otherwise
//!     .attach()?;
//! # drop(probe);
//! # Ok::<(), dwell::Error>(())
//! ```
//!
//! # What it needs
//!
//! | | |
//! |---|---|
//! | kernel | Linux 5.10 or later, with BTF (`CONFIG_DEBUG_INFO_BTF=y`, as distributions have it) |
//! | architecture | one with BPF trampolines: x86-64, arm64 from Linux 6.4 on. Both are tested. Without them, packets can be followed between tracepoints |
//! | privileges | `CAP_BPF` and `CAP_PERFMON`, or root; [some things need more](#privileges) |
//! | memory | some 4 MiB of the kernel's: [`LatencyProbe::memory`] |
//! | on 5.10 | no functions of modules; `CAP_SYS_RESOURCE`, or an `RLIMIT_MEMLOCK` of 8 MiB or more |
//! | from 5.12 on | a lock-free table in place of a hash map, and a ring for each CPU: a fraction of the cost |
//! | from 7.0 on | calls are paired by sessions, and never in doubt |
//! | to build | clang 14 or later, the headers of libelf and zlib, `pkg-config` |
//! | feature `pcap`, off by default | libpcap and its headers; it adds filters by pcap expressions, `Filter::pcap` |
//!
//! # Privileges
//!
//! An ordinary user with these, and no others, has what is named here. What is missing is named by the error.
//!
//! | what | needs |
//! |---|---|
//! | calls, spans, stages, filters, histograms, events, stories, the slowest, [`LatencyProbe::empty_call`] | `CAP_BPF` and `CAP_PERFMON`, for both of which `CAP_SYS_ADMIN` stands, too |
//! | functions of modules | `CAP_SYS_ADMIN` as well |
//! | [`ProgramStatistics`] | `CAP_SYS_ADMIN` |
//! | names in stacks, [`Story::context`], who has dropped a packet | `CAP_SYSLOG`, or the sysctls `kernel.kptr_restrict` 0 and `kernel.perf_event_paranoid` 1; without, stacks are addresses, and the others `None` |
//! | [`Filter::netns_of_pid`], or `/proc/PID/ns/net`, of another user's process | `CAP_SYS_PTRACE` |
//! | [`Filter::pid`], [`Filter::tid`] | to be in the host's pid namespace. Events have the host's pids in any |
//! | [`Filter::cgroup`] | to be in the host's cgroup namespace, or to see the hierarchy's root |
//! | all of it, before Linux 5.11 | `RLIMIT_MEMLOCK` of 8 MiB for the defaults and one function, or `CAP_SYS_RESOURCE`, by which that limit is lifted. From 5.11 on it is left alone |
//! | to be told that the kernel [excludes](NotTraceable::Excluded) a function, not only that it refused it | to read tracefs, as root can |
//!
//! Capabilities count in the initial user namespace only. The lockdown mode `integrity` changes nothing; under
//! `confidentiality` packets' headers can't be read, so that what takes them is refused, or left out of events: flows as keys,
//! filters and groups by headers, and [`identify`](LatencyProbeBuilder::identify) where there is no socket.
//!
//! # Will it work here?
//!
//! [`Support::probe`] says what this machine lets this process measure, found by trying; and where something is missing,
//! why, and what to do. Where functions can't be traced, tracepoints often can.
//!
//! ```
//! use dwell::{Feature, Support};
//!
//! let support = Support::probe();
//! if !support.can_trace_functions() {
//!     eprintln!("{support}");
//! }
//! # let _ = support.has(Feature::Sessions);
//! ```
//!
//! # From event to program
//!
//! An event is there within 100 ms of the span's end, and mostly within some milliseconds. [`LatencyProbe::events`] is a
//! bounded crossbeam channel, to iterate over, to [`select!`] on, or to clone and hand to other threads:
//!
//! ```no_run
//! use std::time::Duration;
//! use dwell::LatencyProbe;
//!
//! let probe = LatencyProbe::builder().function("tcp_v4_rcv").function("udp_recvmsg").attach()?;
//! while let Ok(event) = probe.events().recv_timeout(Duration::from_secs(10)) {
//!     if event.span == "udp_recvmsg" && event.latency > Duration::from_millis(5) {
//!         println!("{} waited {:?} at {:?}", event.comm, event.latency, event.start.to_system_time());
//!     }
//! }
//! # Ok::<(), dwell::Error>(())
//! ```
//!
//! A channel costs more for each event than all else that a probe does in user space. Where there are more than some 100,000
//! a second, let them come [in batches](LatencyProbeBuilder::in_batches), or call a
//! [function](LatencyProbeBuilder::attach_with) with each where it lies, which costs next to nothing:
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//! use std::time::Duration;
//! use dwell::LatencyProbe;
//!
//! let slow = Arc::new(AtomicU64::new(0));
//! let counter = Arc::clone(&slow);
//! let probe = LatencyProbe::builder().function("ip_rcv").attach_with(move |event| {
//!     if event.latency() > Duration::from_micros(50) {
//!         counter.fetch_add(1, Ordering::Relaxed);
//!     }
//! })?;
//! # drop(probe);
//! # Ok::<(), dwell::Error>(())
//! ```
//!
//! [`select!`]: https://docs.rs/crossbeam-channel/latest/crossbeam_channel/macro.select.html

// Library code never panics and never prints.
#![warn(clippy::expect_used, clippy::panic, clippy::print_stderr, clippy::print_stdout, clippy::unwrap_used)]

mod batch;
mod builder;
mod cost;
mod decode;
mod delivery;
mod driver;
mod error;
mod event;
mod events;
mod filter;
mod flow;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzz;
#[cfg(all(test, not(fuzzing)))]
mod fuzz;
mod group;
mod histogram;
mod hook;
mod identity;
mod kernel;
mod ledger;
mod memory;
mod name;
mod pairing;
mod plan;
mod prefetch;
mod probe;
mod resolve;
mod slowest;
mod span;
mod stage;
mod story;
mod support;
mod view;
mod wire;

pub use batch::{Batch, Batches, BatchesIter};
pub use builder::LatencyProbeBuilder;
pub use cost::{Cost, ProgramCost, ProgramStatistics, SpanCost};
pub use driver::{LibbpfLevel, LibbpfLog, set_libbpf_log};
pub use error::{Capability, Error, ErrorKind, Lockdown, NotTraceable};
pub use event::{Comm, DropReason, EventKey, LatencyEvent, MonotonicTime, Outcome, Skb};
pub use events::Events;
pub use filter::{Filter, Ports, Prefix, Protocol};
pub use flow::Flow;
pub use group::{GroupBy, GroupKey, Groups};
pub use histogram::{Bucket, Histogram};
pub use hook::Hook;
pub use identity::Identity;
pub use kernel::Symbol;
pub use ledger::{Imbalance, Ledger, SpanLedger};
pub use memory::Memory;
pub use name::Name;
pub use pairing::{Pairing, Store};
pub use probe::{Failure, LatencyProbe, SpanInfo};
pub use slowest::Slowest;
pub use span::{Key, Restart, Span};
pub use stage::{Stage, StagePlan};
pub use story::{CpuContext, Frame, KernelStack, Story};
pub use support::{Answer, Check, Feature, Support};
pub use view::EventView;

/// Receives events; crossbeam's, re-exported so that it can be named without depending on that crate.
pub use crossbeam_channel::Receiver;
/// Why nothing was received; crossbeam's.
pub use crossbeam_channel::{RecvError, RecvTimeoutError, TryRecvError};
