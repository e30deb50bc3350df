//! How long packets dwell in the Linux network stack.

// Library code never panics and never prints.
#![warn(clippy::expect_used, clippy::panic, clippy::print_stderr, clippy::print_stdout, clippy::unwrap_used)]

mod builder;
mod decode;
mod driver;
mod error;
mod event;
mod kernel;
mod ledger;
mod probe;
mod wire;

pub use builder::LatencyProbeBuilder;
pub use driver::{LibbpfLevel, LibbpfLog, set_libbpf_log};
pub use error::{Capability, Error, ErrorKind, Lockdown, NotTraceable};
pub use event::{Comm, LatencyEvent, MonotonicTime, Skb, SpanName};
pub use ledger::{Ledger, SpanLedger};
pub use probe::{LatencyProbe, Pairing, SpanInfo, Store};

/// Receives events; crossbeam's, re-exported so that it can be named without depending on that crate.
pub use crossbeam_channel::Receiver;
