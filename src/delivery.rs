//! How events get from the reader to the program: one of three ways. None of them waits.

use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crossbeam_channel::Sender;

use crate::batch::BatchSender;
use crate::event::LatencyEvent;
use crate::view::EventView;

/// What a program wants to be called with each event.
pub(crate) type Function = dyn FnMut(&EventView<'_>) + Send;

/// The same, until it panics.
pub(crate) struct Callback(Option<Box<Function>>);

/// The way to the program.
pub(crate) enum Delivery {
    Events(Sender<LatencyEvent>),
    Batches(BatchSender),
    Callback(Callback),
}

impl Delivery {
    /// Hands one event over; whether it was taken. For many at once see `Intake::take`.
    pub(crate) fn deliver(&mut self, view: &EventView<'_>) -> bool {
        match self {
            Self::Events(sender) => sender.try_send(view.to_event()).is_ok(),
            Self::Batches(sender) => sender.push(|| view.to_event()),
            Self::Callback(callback) => !matches!(callback.guard(|function| function(view)), Called::Never),
        }
    }

    /// For when there are no more events at the moment.
    pub(crate) fn flush(&mut self) {
        if let Self::Batches(sender) = self {
            sender.flush();
        }
    }

    /// Whether events were taken that the program can't have yet.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self, Self::Batches(sender) if sender.is_pending())
    }
}

/// What became of something that a callback was needed for.
pub(crate) enum Called<T> {
    Returned(T),
    /// It did so just now.
    Panicked,
    /// It has panicked before, so it isn't called any more.
    Never,
}

impl Callback {
    pub(crate) fn new(function: impl FnMut(&EventView<'_>) + Send + 'static) -> Self {
        Self(Some(Box::new(function)))
    }

    /// Lends it to `work`, and catches its panic.
    pub(crate) fn guard<T>(&mut self, work: impl FnOnce(&mut Function) -> T) -> Called<T> {
        let Some(function) = &mut self.0 else { return Called::Never };
        // It isn't called again, so nobody sees what it left half done.
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut **function)));
        match result {
            Ok(value) => Called::Returned(value),
            Err(panic) => {
                // Its own drop might panic, too.
                mem::forget(panic);
                let broken = self.0.take();
                let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
                Called::Panicked
            }
        }
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Events(_) => "Events",
            Self::Batches(_) => "Batches",
            Self::Callback(_) => "Callback",
        })
    }
}
