//! The running probe.

use std::fmt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::Receiver;
use rustix::thread::{MembarrierCommand, membarrier};

use crate::builder::LatencyProbeBuilder;
use crate::driver::{AttachedSpan, Reader, Switch};
use crate::error::Error;
use crate::event::{LatencyEvent, Name};
use crate::ledger::{Ledger, SpanLedger};
use crate::pairing::{Pairing, Store};
use crate::plan::{Body, Role, SpanPlan};
use crate::span::Key;

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
    failures: Vec<Failure>,
    switch: Switch,
    reader: Reader,
    events: Receiver<LatencyEvent>,
}

/// What is known of an attached span.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpanInfo {
    /// Its name.
    pub name: Name,
    /// What its ends are matched by.
    pub key: Key,
    /// Where it starts: functions (each call's entry) or hooks, as [`Hook`](crate::Hook) is written.
    pub starts: Vec<String>,
    /// Where it ends; for calls the exits of the same functions.
    pub ends: Vec<String>,
    /// Where what the key stands for ends: what is met there is abandoned. Chosen by what this kernel has.
    pub releases: Vec<String>,
    /// How its ends are matched.
    pub pairing: Pairing,
    /// Where its starts wait for their ends.
    pub store: Store,
    /// Whether tracepoints among its hooks are typed, so that a packet's length can be read. `true` if there are none.
    pub typed: bool,
    /// What is older than this has expired.
    pub max_age: Option<Duration>,
    /// Whether an address that is used again can't be taken for the packet or socket that had it before. `false` where
    /// functions can't be traced, since tracepoints alone don't see every packet go: see [`Key`].
    pub lives_are_seen: bool,
    with_abandoned: bool,
}

impl SpanInfo {
    pub(crate) fn new(plan: &SpanPlan, store: Store, typed: bool) -> Self {
        let mut info = Self {
            name: plan.name.clone(),
            key: plan.key,
            starts: Vec::new(),
            ends: Vec::new(),
            releases: Vec::new(),
            pairing: Pairing::Frame,
            store,
            typed: true,
            max_age: plan.max_age,
            lives_are_seen: plan.lives_are_seen,
            with_abandoned: plan.with_abandoned,
        };
        match &plan.body {
            Body::Calls(calls) => {
                for call in calls {
                    info.starts.push(call.function.to_string());
                    info.ends.push(format!("{}:exit", call.function));
                }
            }
            Body::Hooks(hooks) => {
                info.pairing = Pairing::Key;
                info.typed = typed || !hooks.iter().any(crate::plan::HookPlan::is_tracepoint);
                for hook in hooks {
                    let list = match hook.role {
                        Role::Start => &mut info.starts,
                        Role::End => &mut info.ends,
                        Role::Abandon { .. } => &mut info.releases,
                    };
                    list.push(hook.site.to_string());
                }
            }
        }
        info
    }
}

/// A span that couldn't be attached, see [`LatencyProbeBuilder::best_effort`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The span's name.
    pub span: Name,
    /// Why not.
    pub error: Error,
}

/// `SPAN: ERROR`
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.span, self.error)
    }
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
        spans: Vec<(SpanInfo, AttachedSpan)>,
        failures: Vec<Failure>,
        switch: Switch,
        reader: Reader,
        events: Receiver<LatencyEvent>,
    ) -> Self {
        let (infos, spans) = spans.into_iter().unzip();
        Self { infos, spans, failures, switch, reader, events }
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

    /// The spans that couldn't be attached, if [`best_effort`](LatencyProbeBuilder::best_effort) was asked for.
    pub fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// What has become of every call so far.
    ///
    /// While calls are running, the counters are read one after the other, and the sums may be off by the calls in
    /// between. Takes a few system calls for each span.
    pub fn ledger(&self) -> Ledger {
        let tally = self.reader.tally();
        let accounts = self.infos.iter().zip(&self.spans).map(|(info, span)| {
            let tally = tally.span(span.index());
            let doubtful = tally.doubtful.load(Ordering::Relaxed);
            let doubtful_abandoned = tally.doubtful_abandoned.load(Ordering::Relaxed);
            let snapshot = span.snapshot();
            let counters = snapshot.counters;
            let completed = counters.completed.saturating_sub(doubtful);
            let abandoned = counters.abandoned.saturating_sub(doubtful_abandoned);
            SpanLedger {
                span: info.name.clone(),
                started: counters.started,
                completed,
                emitted: completed + if info.with_abandoned { abandoned } else { 0 },
                delivered: tally.delivered.load(Ordering::Relaxed),
                ring_dropped: counters.ring_dropped,
                channel_dropped: tally.channel_dropped.load(Ordering::Relaxed),
                abandoned,
                untracked: counters.untracked,
                overwritten: counters.overwritten,
                mismatched: counters.mismatched + doubtful + doubtful_abandoned,
                expired: counters.expired + snapshot.expired,
                open: snapshot.open,
                unmatched: counters.unmatched,
                unkeyed: counters.unkeyed,
                missed: snapshot.skipped.starts,
                missed_exits: snapshot.skipped.ends,
                missed_releases: snapshot.skipped.releases,
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
        // The hooks go one by one, which takes a while; what is left of them must not see half of what happens.
        self.switch.off();
        // A program that runs on another CPU at this moment may be about to write a record. Programs run in RCU
        // read-side sections, and this waits for all of those to end. Where it isn't allowed (seccomp) or can't be
        // (nohz_full CPUs), such a record may stay unread, and its call counts as completed but not as delivered.
        let _ = membarrier(MembarrierCommand::Global);
        self.spans.iter_mut().for_each(AttachedSpan::detach);
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
