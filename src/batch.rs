//! Events in batches: vectors that go round between the reader and the program.

use std::fmt;
use std::mem;
use std::ops::Deref;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvError, RecvTimeoutError, Sender, TryRecvError, bounded};

use crate::event::LatencyEvent;
use crate::prefetch;

/// So many events ahead the memory is asked for, which the program has read last.
const AHEAD: usize = 4;

/// The receiving end of a probe that hands its events over in batches, see
/// [`in_batches`](crate::LatencyProbeBuilder::in_batches).
///
/// Can be cloned and handed to other threads; each batch goes to one of them. Ends once the probe is stopped and all has
/// been read. It is no crossbeam receiver, so it can't be used in `select!`; to wait for other things as well, there
/// are [`recv_timeout`](Self::recv_timeout) and [`try_recv`](Self::try_recv).
///
/// ```no_run
/// use std::time::Duration;
/// use dwell::LatencyProbe;
///
/// let probe = LatencyProbe::builder().function("ip_rcv").in_batches(1_024).attach()?;
/// let mut longest = Duration::ZERO;
/// for batch in probe.batches().iter().take(1_000) {
///     longest = batch.iter().map(|event| event.latency).fold(longest, Duration::max);
/// }
/// # Ok::<(), dwell::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Batches {
    full: Receiver<Vec<LatencyEvent>>,
    /// Back to the reader.
    empty: Sender<Vec<LatencyEvent>>,
    /// Events in each.
    size: usize,
}

/// Some events, at least one, in the order of [`LatencyProbe::events`](crate::LatencyProbe::events).
///
/// A slice of [`LatencyEvent`]. Its memory goes back to the probe when it is dropped; so drop it soon, and copy what is
/// to be kept.
pub struct Batch {
    events: Vec<LatencyEvent>,
    home: Sender<Vec<LatencyEvent>>,
}

/// What fills the batches.
#[derive(Debug)]
pub(crate) struct BatchSender {
    size: usize,
    /// Full batches that may wait. The channel has room for one more, which is the last.
    waiting: usize,
    filling: Vec<LatencyEvent>,
    full: Sender<Vec<LatencyEvent>>,
    empty: Receiver<Vec<LatencyEvent>>,
}

/// Of batches of `size` events each, with room for about `capacity` events.
pub(crate) fn channel(size: usize, capacity: usize) -> (BatchSender, Batches) {
    // One of them is the one that is being filled.
    let waiting = capacity.div_ceil(size).saturating_sub(1).max(1);
    let (full, filled) = bounded(waiting + 1);
    // And those that the program holds.
    let (empty, emptied) = bounded(waiting + 4);
    let sender = BatchSender { size, waiting, filling: Vec::with_capacity(size), full, empty: emptied };
    (sender, Batches { full: filled, empty, size })
}

/// Of which nothing ever comes.
pub(crate) fn closed() -> Batches {
    channel(1, 1).1
}

impl BatchSender {
    /// Takes an event, or refuses it, since the program reads too slowly. What is taken will be received, whatever comes.
    #[inline]
    pub(crate) fn push(&mut self, event: impl FnOnce() -> LatencyEvent) -> bool {
        if self.filling.len() >= self.size {
            if self.full.len() >= self.waiting {
                return false;
            }
            self.hand_over();
        }
        // There is room, since it was made as large; said here, so that the event is made where it stays.
        if self.filling.len() == self.filling.capacity() {
            self.filling.reserve(1);
        }
        self.filling.push(event());
        prefetch::for_writing(self.filling.as_ptr().wrapping_add(self.filling.len() + AHEAD));
        true
    }

    /// So many events will be taken, however slowly the program reads.
    pub(crate) fn room(&self) -> usize {
        let batches = self.waiting.saturating_sub(self.full.len());
        self.size.saturating_sub(self.filling.len()) + batches.saturating_mul(self.size)
    }

    /// For when there are no more events at the moment: hands over what there is, unless others wait already to be
    /// received. Batches that are hardly filled would take as much room as full ones.
    pub(crate) fn flush(&mut self) {
        if self.is_pending() && self.full.is_empty() {
            self.hand_over();
        }
    }

    /// Whether there are events to hand over.
    pub(crate) fn is_pending(&self) -> bool {
        !self.filling.is_empty()
    }

    fn hand_over(&mut self) {
        let mut next = self.empty.try_recv().unwrap_or_default();
        next.reserve_exact(self.size);
        // There is room, and if nobody receives any more, nobody misses them.
        let _ = self.full.try_send(mem::replace(&mut self.filling, next));
    }
}

/// Hands over what there is.
impl Drop for BatchSender {
    fn drop(&mut self) {
        if self.is_pending() {
            let _ = self.full.try_send(mem::take(&mut self.filling));
        }
    }
}

impl Batches {
    /// The memory of all that can wait at once, and of the one that is being filled.
    pub(crate) fn bytes(&self) -> u64 {
        (self.full.capacity().unwrap_or(0) * self.size * size_of::<LatencyEvent>()) as u64
    }

    /// Waits for the next batch.
    ///
    /// # Errors
    ///
    /// Once the probe is stopped and all has been received.
    pub fn recv(&self) -> Result<Batch, RecvError> {
        self.full.recv().map(|events| self.batch(events))
    }

    /// Waits for the next batch, so long at most.
    ///
    /// # Errors
    ///
    /// [`RecvTimeoutError::Timeout`] when the time is up, [`RecvTimeoutError::Disconnected`] once the probe is stopped
    /// and all has been received.
    pub fn recv_timeout(&self, timeout: Duration) -> Result<Batch, RecvTimeoutError> {
        self.full.recv_timeout(timeout).map(|events| self.batch(events))
    }

    /// The next batch, if there is one already.
    ///
    /// # Errors
    ///
    /// [`TryRecvError::Empty`] if there is none, [`TryRecvError::Disconnected`] once the probe is stopped and all has been
    /// received.
    pub fn try_recv(&self) -> Result<Batch, TryRecvError> {
        self.full.try_recv().map(|events| self.batch(events))
    }

    /// Waits for one batch after the other, and ends once the probe is stopped and all has been received.
    pub fn iter(&self) -> BatchesIter<'_> {
        BatchesIter(self)
    }

    fn batch(&self, events: Vec<LatencyEvent>) -> Batch {
        Batch { events, home: self.empty.clone() }
    }
}

/// Waits for one batch after the other: see [`Batches::iter`].
#[derive(Debug)]
pub struct BatchesIter<'a>(&'a Batches);

impl Iterator for BatchesIter<'_> {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        self.0.recv().ok()
    }
}

impl<'a> IntoIterator for &'a Batches {
    type Item = Batch;
    type IntoIter = BatchesIter<'a>;

    fn into_iter(self) -> BatchesIter<'a> {
        self.iter()
    }
}

impl Deref for Batch {
    type Target = [LatencyEvent];

    fn deref(&self) -> &[LatencyEvent] {
        &self.events
    }
}

impl<'a> IntoIterator for &'a Batch {
    type Item = &'a LatencyEvent;
    type IntoIter = std::slice::Iter<'a, LatencyEvent>;

    fn into_iter(self) -> Self::IntoIter {
        self.events.iter()
    }
}

/// Its memory goes back to the probe.
impl Drop for Batch {
    fn drop(&mut self) {
        let mut events = mem::take(&mut self.events);
        events.clear();
        let _ = self.home.try_send(events);
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.events).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::tests::event;

    fn numbered(pid: u32) -> LatencyEvent {
        LatencyEvent { pid, ..event() }
    }

    fn pids(batch: &Batch) -> Vec<u32> {
        batch.iter().map(|event| event.pid).collect()
    }

    /// Full batches go at once, others when there is nothing else to do, and the last one at the end.
    #[test]
    fn full_and_partial() {
        let (mut sender, batches) = channel(3, 100);
        assert!((0..4).all(|pid| sender.push(|| numbered(pid))));
        assert_eq!(pids(&batches.try_recv().unwrap()), [0, 1, 2]);
        assert!(batches.try_recv().is_err());
        sender.flush();
        sender.flush();
        assert_eq!(pids(&batches.try_recv().unwrap()), [3]);
        assert!(batches.try_recv().is_err() && !sender.is_pending());
        assert!(sender.push(|| numbered(5)) && sender.is_pending());
        drop(sender);
        assert_eq!(batches.iter().map(|batch| pids(&batch)).collect::<Vec<_>>(), [[5]]);
        assert!(batches.recv().is_err());
    }

    /// Few events don't take the room of many: while a batch waits, the next one fills.
    #[test]
    fn partial_batches_wait() {
        let (mut sender, batches) = channel(3, 100);
        for pid in 0..3 {
            assert!(sender.push(|| numbered(pid)));
            sender.flush();
        }
        assert_eq!(pids(&batches.try_recv().unwrap()), [0]);
        sender.flush();
        assert_eq!(pids(&batches.try_recv().unwrap()), [1, 2]);
    }

    /// When there is no room, new events are refused, and none that was taken is lost.
    #[test]
    fn bounded() {
        for (size, capacity, room) in [(3, 9, 9), (3, 10, 12), (3, 1, 6), (1, 1, 2), (1, 5, 5)] {
            let (mut sender, batches) = channel(size, capacity);
            let taken: Vec<_> = (0..100).filter(|pid| sender.push(|| numbered(*pid))).collect();
            assert_eq!(taken, (0..room).collect::<Vec<_>>(), "{size} {capacity}");
            let first = batches.try_recv().unwrap();
            assert!(sender.push(|| numbered(100)));
            sender.flush();
            drop(sender);
            let received: Vec<_> = batches.iter().flat_map(|batch| pids(&batch)).collect();
            assert_eq!(pids(&first), taken[..size]);
            assert_eq!(received, [&taken[size..], &[100]].concat());
        }
    }

    /// The same few vectors go round.
    #[test]
    fn recycled() {
        let (mut sender, batches) = channel(2, 8);
        let mut seen = std::collections::BTreeSet::new();
        for pid in 0..1_000 {
            assert!(sender.push(|| numbered(pid)));
            if let Ok(batch) = batches.try_recv() {
                seen.insert(batch.as_ptr());
            }
        }
        assert!(seen.len() <= 3, "{seen:?}");
    }

    /// Nothing comes, and that is known at once.
    #[test]
    fn of_no_probe() {
        assert_eq!(closed().iter().count(), 0);
        fn is<T: Send + Sync + fmt::Debug + 'static>() {}
        is::<Batches>();
        is::<Batch>();
    }
}
