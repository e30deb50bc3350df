//! The running probe.

use std::fmt;
use std::sync::atomic::Ordering;

use crossbeam_channel::Receiver;
use rustix::thread::{MembarrierCommand, membarrier};

use crate::builder::LatencyProbeBuilder;
use crate::driver::{AttachedSpan, Reader};
use crate::event::{LatencyEvent, SpanName};
use crate::ledger::{Ledger, SpanLedger};
use crate::pairing::{Pairing, Store};

/// Measures how long kernel functions take, as long as it lives.
///
/// Made by [`LatencyProbe::builder`]. It owns all that it needs, can be moved to another thread, and several can run
/// at once, in one process or in many, on the same functions or on others.
///
/// # Privileges
///
/// `CAP_BPF` and `CAP_PERFMON`, or root; for functions of modules `CAP_SYS_ADMIN`.
///
/// # Kernel
///
/// Linux 5.10 or later with BTF, on an architecture with BPF trampolines (x86-64; arm64 from 6.4 on).
///
/// # Examples
///
/// ```no_run
/// use dwell::LatencyProbe;
///
/// let probe = LatencyProbe::builder().function("ip_rcv").attach()?;
/// for event in probe.events().iter().take(10) {
///     println!("{event}");
/// }
/// println!("{}", probe.stop());
/// # Ok::<(), dwell::Error>(())
/// ```
#[must_use = "a probe that is dropped is detached at once"]
pub struct LatencyProbe {
    infos: Vec<SpanInfo>,
    spans: Vec<AttachedSpan>,
    reader: Reader,
    events: Receiver<LatencyEvent>,
}

/// What is known of an attached span.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpanInfo {
    /// Its name.
    pub name: SpanName,
    /// The function, without its module.
    pub function: String,
    /// The module that the function is in; `None`: the kernel itself.
    pub module: Option<String>,
    /// How its ends are matched.
    pub pairing: Pairing,
    /// Where its started calls wait for their exit.
    pub store: Store,
}

impl LatencyProbe {
    /// Begins to describe a probe.
    ///
    /// ```
    /// let builder = dwell::LatencyProbe::builder().function("ip_rcv").function("udp_sendmsg");
    /// # drop(builder);
    /// ```
    pub fn builder() -> LatencyProbeBuilder {
        LatencyProbeBuilder::new()
    }

    pub(crate) fn new(
        infos: Vec<SpanInfo>,
        spans: Vec<AttachedSpan>,
        reader: Reader,
        events: Receiver<LatencyEvent>,
    ) -> Self {
        Self { infos, spans, reader, events }
    }

    /// The events, in the order in which the calls ended (as far as CPUs agree on one).
    ///
    /// A bounded channel: while it is full, events are dropped and counted as
    /// [`channel_dropped`](SpanLedger::channel_dropped). At a low rate an event arrives within a few milliseconds of
    /// the call's end. Iterating blocks for the next event, and ends once the probe is stopped and all has been read;
    /// a clone of the receiver can be read on after [`stop`](Self::stop).
    pub fn events(&self) -> &Receiver<LatencyEvent> {
        &self.events
    }

    /// The spans, in the order in which they were asked for.
    pub fn spans(&self) -> &[SpanInfo] {
        &self.infos
    }

    /// What has become of every call so far.
    ///
    /// While calls are running, the counters are read one after the other, and the sums may be off by the calls in
    /// between. Takes a few system calls for each span.
    pub fn ledger(&self) -> Ledger {
        let tally = self.reader.tally();
        let accounts = self.infos.iter().zip(&self.spans).zip(tally.spans()).map(|((info, span), tally)| {
            let doubtful = tally.doubtful.load(Ordering::Relaxed);
            let snapshot = span.snapshot();
            let counters = snapshot.counters;
            SpanLedger {
                span: info.name.clone(),
                started: counters.started,
                completed: counters.completed.saturating_sub(doubtful),
                delivered: tally.delivered.load(Ordering::Relaxed),
                ring_dropped: counters.ring_dropped,
                channel_dropped: tally.channel_dropped.load(Ordering::Relaxed),
                untracked: counters.untracked,
                overwritten: counters.overwritten,
                mismatched: counters.mismatched + doubtful,
                open: snapshot.open,
                unmatched: counters.unmatched,
                missed: snapshot.skipped.entries,
                missed_exits: snapshot.skipped.exits,
            }
        });
        Ledger { spans: accounts.collect(), undecodable: tally.undecodable() }
    }

    /// Detaches, puts the events that the kernel had written into the channel, closes it, and returns the last ledger.
    ///
    /// Doesn't wait for the channel to be read: what finds it full is dropped and counted. To read all that is left,
    /// clone the receiver first.
    ///
    /// ```no_run
    /// # let probe = dwell::LatencyProbe::builder().function("ip_rcv").attach()?;
    /// let events = probe.events().clone();
    /// let ledger = probe.stop();
    /// assert!(ledger.is_balanced());
    /// for event in events {
    ///     println!("{event}");
    /// }
    /// # Ok::<(), dwell::Error>(())
    /// ```
    pub fn stop(mut self) -> Ledger {
        self.halt();
        self.ledger()
    }

    fn halt(&mut self) {
        self.spans.iter_mut().for_each(AttachedSpan::detach);
        // A program that runs on another CPU at this moment may be about to write a record. Programs run in RCU
        // read-side sections, and this waits for all of those to end. Where it isn't allowed (seccomp) or can't be
        // (nohz_full CPUs), such a record may stay unread, and its call counts as completed but not as delivered.
        let _ = membarrier(MembarrierCommand::Global);
        self.reader.stop();
    }
}

/// Detaches, as [`LatencyProbe::stop`] does.
impl Drop for LatencyProbe {
    fn drop(&mut self) {
        self.halt();
    }
}

impl fmt::Debug for LatencyProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LatencyProbe").field("spans", &self.infos).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A probe can be kept in any struct and moved to any thread.
    #[test]
    fn travels() {
        fn is<T: Send + Sync + fmt::Debug + 'static>() {}
        is::<LatencyProbe>();
        is::<Receiver<LatencyEvent>>();
    }
}
