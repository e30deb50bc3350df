//! An event where the kernel wrote it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::decode::{Codec, EndCodec, drop_reason, dropped_by, event_key, return_value};
use crate::event::{Comm, EventKey, LatencyEvent, MonotonicTime, Outcome, Skb};
use crate::identity::Identity;
use crate::name::Name;
use crate::span::Key;
use crate::story::Story;
use crate::wire::{KeyedRecord, Record, outcome};

/// One finished span, where the kernel wrote it: what a callback gets, see
/// [`attach_with`](crate::LatencyProbeBuilder::attach_with).
///
/// Its methods tell what the fields of [`LatencyEvent`] tell, each read only when it is asked for. It lasts until the
/// callback returns; [`to_event`](Self::to_event) copies what is to be kept:
///
/// ```no_run
/// # use std::sync::Mutex;
/// # use dwell::{LatencyEvent, LatencyProbe};
/// static KEPT: Mutex<Vec<LatencyEvent>> = Mutex::new(Vec::new());
///
/// let probe = LatencyProbe::builder().function("ip_rcv").attach_with(|event| KEPT.lock().unwrap().push(event.to_event()))?;
/// # drop(probe);
/// # Ok::<(), dwell::Error>(())
/// ```
///
/// The view itself can't be, since its memory is the kernel's to write to again:
///
/// ```compile_fail,E0521
/// # use std::sync::Mutex;
/// # use dwell::{EventView, LatencyProbe};
/// static KEPT: Mutex<Vec<EventView<'static>>> = Mutex::new(Vec::new());
///
/// let probe = LatencyProbe::builder().function("ip_rcv").attach_with(|event| KEPT.lock().unwrap().push(*event))?;
/// # drop(probe);
/// # Ok::<(), dwell::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct EventView<'a> {
    codec: &'a Codec,
    end: &'a EndCodec,
    record: &'a Record,
    /// The same record, where a key was matched that has more to tell.
    keyed: Option<&'a KeyedRecord>,
    /// And all of it, where there is more.
    bytes: &'a [u8],
}

impl<'a> EventView<'a> {
    /// Of a record that has been checked.
    pub(crate) fn new(
        codec: &'a Codec,
        end: &'a EndCodec,
        record: &'a Record,
        keyed: Option<&'a KeyedRecord>,
        bytes: &'a [u8],
    ) -> Self {
        Self { codec, end, record, keyed, bytes }
    }

    /// The span's index in its probe.
    pub(crate) fn index(&self) -> usize {
        self.end.span
    }

    /// Whether the start may be another call's. If not, the pair is certain.
    pub(crate) fn is_suspect(&self) -> bool {
        self.record.suspect != 0
    }

    /// See [`LatencyEvent::span`].
    pub fn span(&self) -> Name {
        self.end.span_name
    }

    /// See [`LatencyEvent::ended_at`].
    pub fn ended_at(&self) -> Name {
        self.end.name
    }

    /// See [`LatencyEvent::outcome`].
    #[inline]
    pub fn outcome(&self) -> Outcome {
        let Some(keyed) = self.keyed else { return Outcome::Completed };
        match keyed.outcome {
            outcome::DROPPED => Outcome::Dropped {
                reason: drop_reason(self.codec, keyed.reason),
                by: dropped_by(self.codec, self.record),
            },
            outcome::CONSUMED => Outcome::Consumed,
            outcome::RELEASED => Outcome::Released,
            _ => Outcome::Completed,
        }
    }

    /// See [`LatencyEvent::key`].
    #[inline]
    pub fn key(&self) -> EventKey {
        // Flows of no known version have been refused.
        self.keyed.and_then(|keyed| event_key(self.end.key, keyed)).unwrap_or(EventKey::Call)
    }

    /// See [`LatencyEvent::start`].
    pub fn start(&self) -> MonotonicTime {
        MonotonicTime::from_nanos(self.record.start_ns)
    }

    /// See [`LatencyEvent::end`].
    pub fn end(&self) -> MonotonicTime {
        MonotonicTime::from_nanos(self.record.start_ns.saturating_add(self.record.latency_ns))
    }

    /// See [`LatencyEvent::latency`].
    pub fn latency(&self) -> Duration {
        Duration::from_nanos(self.record.latency_ns)
    }

    /// See [`LatencyEvent::pid`].
    pub fn pid(&self) -> u32 {
        self.record.pid
    }

    /// See [`LatencyEvent::tid`].
    pub fn tid(&self) -> u32 {
        self.record.tid
    }

    /// See [`LatencyEvent::comm`].
    pub fn comm(&self) -> Comm {
        Comm::from_bytes(self.record.comm)
    }

    /// See [`LatencyEvent::cpu_start`].
    pub fn cpu_start(&self) -> u32 {
        self.record.cpu_start
    }

    /// See [`LatencyEvent::cpu_end`].
    pub fn cpu_end(&self) -> u32 {
        self.record.cpu_end
    }

    /// See [`LatencyEvent::ret`].
    #[inline]
    pub fn ret(&self) -> Option<i64> {
        return_value(self.record.ret, self.end.ret)
    }

    /// See [`LatencyEvent::skb`].
    #[inline]
    pub fn skb(&self) -> Option<Skb> {
        let Record { skb, len, .. } = *self.record;
        (skb != 0).then(|| Skb::new(skb, self.end.has_len.then_some(len)))
    }

    /// See [`LatencyEvent::identity`].
    #[inline]
    pub fn identity(&self) -> Option<Identity> {
        self.end.more.identity(self.bytes).filter(|identity| identity.known != 0).map(Identity::new)
    }

    /// See [`LatencyEvent::story`]. Looks the stack's symbols up, each time.
    pub fn story(&self) -> Option<Story> {
        let symbols = self.codec.symbols.as_deref();
        self.end.more.story(self.bytes).map(|story| Story::new(story, symbols, self.end.address))
    }

    /// A copy of all of it, to keep.
    #[inline]
    pub fn to_event(&self) -> LatencyEvent {
        // What is most common is made in one piece. To put together what may be of any kind takes several times as long,
        // since its parts are written in pieces and read as a whole.
        match (self.end.key, self.keyed) {
            (_, None) => self.event_of(EventKey::Call, Outcome::Completed),
            (Key::Skb, Some(keyed)) if keyed.outcome == outcome::REACHED => {
                self.event_of(EventKey::Skb(keyed.key), Outcome::Completed)
            }
            _ => self.event_of(self.key(), self.outcome()),
        }
    }

    #[inline(always)]
    fn event_of(&self, key: EventKey, outcome: Outcome) -> LatencyEvent {
        LatencyEvent {
            span: self.span(),
            ended_at: self.ended_at(),
            outcome,
            key,
            start: self.start(),
            latency: self.latency(),
            pid: self.pid(),
            tid: self.tid(),
            comm: self.comm(),
            cpu_start: self.cpu_start(),
            cpu_end: self.cpu_end(),
            ret: self.ret(),
            skb: self.skb(),
            identity: self.identity(),
            story: self.story().map(Arc::new),
        }
    }
}

/// The line that [`LatencyEvent`] makes.
impl fmt::Display for EventView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_event().fmt(f)
    }
}

impl fmt::Debug for EventView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EventView").field(&self.to_event()).finish()
    }
}
