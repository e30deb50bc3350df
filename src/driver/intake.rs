//! What happens with each record: checked, withheld where its pair is in doubt, handed over.

use std::sync::Arc;

use super::doubt::Doubt;
use super::rings::CpuRings;
use super::state::Programs;
use super::stop::Stop;
use super::tally::{SpanTally, Tally};
use crate::decode::Codec;
use crate::delivery::{Called, Delivery};
use crate::event::MonotonicTime;
use crate::span::Key;
use crate::view::EventView;

/// A record of this length only says that there are others to be read.
const DOORBELL: usize = 8;

/// Where records are.
pub(super) trait Source {
    /// Hands each to `accept`. How many it were.
    fn each(&mut self, accept: impl FnMut(&[u8])) -> usize;

    /// So many at most.
    fn most(&self) -> usize;
}

/// Up to so many of the CPUs' rings.
pub(super) struct FromRings<'a>(pub(super) &'a mut CpuRings, pub(super) usize);

impl Source for FromRings<'_> {
    #[inline(always)]
    fn each(&mut self, accept: impl FnMut(&[u8])) -> usize {
        self.0.take(self.1, accept)
    }

    fn most(&self) -> usize {
        self.1
    }
}

/// One of the kernel's ring buffer.
pub(super) struct One<'a>(pub(super) &'a [u8]);

impl Source for One<'_> {
    fn each(&mut self, mut accept: impl FnMut(&[u8])) -> usize {
        if self.0.len() != DOORBELL {
            accept(self.0);
        }
        1
    }

    fn most(&self) -> usize {
        1
    }
}

/// From a record to the program.
pub(super) struct Intake {
    codec: Arc<Codec>,
    delivery: Delivery,
    tally: Arc<Tally>,
    programs: Arc<Programs>,
    stop: Arc<Stop>,
    doubts: Vec<Doubt>,
}

impl Intake {
    pub(super) fn new(
        codec: Arc<Codec>,
        delivery: Delivery,
        tally: Arc<Tally>,
        programs: Arc<Programs>,
        stop: Arc<Stop>,
    ) -> Self {
        let doubts = codec.spans.iter().map(|_| Doubt::new()).collect();
        Self { codec, delivery, tally, programs, stop, doubts }
    }

    /// So many records may be taken now: with backpressure, the room that the program has left.
    pub(super) fn room(&self) -> usize {
        if self.stop.is_hurried() { usize::MAX } else { self.delivery.room() }
    }

    /// Before records are taken that were there already: asks what the kernel has skipped by now, so that of each of their
    /// pairs it can be said whether it is certain.
    pub(super) fn look(&mut self) {
        for (span, codec) in self.codec.spans.iter().enumerate().filter(|(_, codec)| codec.doubted) {
            let skipped = self.programs.skipped_in_doubt(span, codec.key == Key::Call);
            self.doubts[span].note(skipped, MonotonicTime::now());
        }
    }

    /// Takes records from where they are. How many it were; if fewer than the source gives at most, then there are no more
    /// at the moment.
    pub(super) fn take(&mut self, source: &mut impl Source) -> usize {
        let records = Records { codec: &self.codec, tally: &self.tally, doubts: &self.doubts };
        // For each way a loop of its own, which doesn't ask at each record which it is.
        match &mut self.delivery {
            Delivery::Events { sender, .. } => source.each(|bytes| {
                records.check(bytes, |view, tally| tally.count(sender.try_send(view.to_event()).is_ok()));
            }),
            Delivery::Batches { sender, .. } => source.each(|bytes| {
                records.check(bytes, |view, tally| tally.count(sender.push(|| view.to_event())));
            }),
            Delivery::Callback(callback) => {
                let taken = callback.guard(|function| {
                    source.each(|bytes| {
                        records.check(bytes, |view, tally| {
                            let called = !self.stop.is_hurried();
                            // Before it panics.
                            tally.count(called);
                            if called {
                                function(view);
                            }
                        });
                    })
                });
                match taken {
                    Called::Returned(taken) => taken,
                    // Not the end, then.
                    Called::Panicked => source.most(),
                    Called::Never => source.each(|bytes| records.check(bytes, |_, tally| tally.count(false))),
                }
            }
        }
    }

    /// For when there are no more records at the moment.
    pub(super) fn flush(&mut self) {
        self.delivery.flush();
    }

    /// Whether something waits for the next `flush`.
    pub(super) fn is_pending(&self) -> bool {
        self.delivery.is_pending()
    }
}

/// What it takes to tell good records from others.
struct Records<'a> {
    codec: &'a Codec,
    tally: &'a Tally,
    doubts: &'a [Doubt],
}

impl Records<'_> {
    /// Hands a record over, if it is one, and its pair is certain.
    #[inline(always)]
    fn check(&self, bytes: &[u8], hand_over: impl FnOnce(&EventView<'_>, &SpanTally)) {
        let Ok(view) = self.codec.view(bytes) else {
            self.tally.undecodable.add_one();
            return;
        };
        let tally = self.tally.span(view.index());
        if view.is_suspect() && !self.doubts[view.index()].is_ruled_out(view.start()) {
            tally.withheld.add_one();
        } else {
            hand_over(&view, tally);
        }
    }
}
