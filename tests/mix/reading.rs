//! Random ways of reading a probe's events.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dwell::{Batches, Error, LatencyEvent, LatencyProbe, Name, Receiver};
use fastrand::Rng;

use super::probes::Wish;

/// So many events of each span.
#[derive(Debug, Default)]
pub struct Received(BTreeMap<Name, u64>);

impl Received {
    pub fn of(&self, span: &Name) -> u64 {
        self.0.get(span).copied().unwrap_or(0)
    }

    fn note(&mut self, span: Name) {
        *self.0.entry(span).or_default() += 1;
    }
}

/// Who reads, and how.
pub struct Reading {
    who: Who,
    slow: bool,
}

enum Who {
    /// A thread, at its own speed.
    Thread(JoinHandle<Received>),
    /// Nobody, until the end.
    Late(Receiver<LatencyEvent>, Batches),
    /// The callback.
    Callback(Arc<Mutex<Received>>),
}

impl Reading {
    /// Whether the probe's reader may have to wait.
    pub fn is_slow(&self) -> bool {
        self.slow
    }

    /// All that has come, once the probe has been stopped.
    pub fn finish(self) -> Received {
        match self.who {
            Who::Thread(thread) => thread.join().expect("reading doesn't panic"),
            Who::Late(events, batches) => read(&events, &batches, Duration::ZERO),
            Who::Callback(received) => std::mem::take(&mut received.lock().expect("nobody else is left")),
        }
    }
}

/// Attaches, to be read in some way.
pub fn attach(wish: &Wish, rng: &mut Rng) -> Result<(LatencyProbe, Reading), Error> {
    let builder = wish.builder.clone();
    if rng.u8(0..4) == 0 {
        let received = Arc::new(Mutex::new(Received::default()));
        let (place, mut left) = (Arc::clone(&received), if rng.bool() { u64::MAX } else { rng.u64(1..50) });
        let pause = Duration::from_micros([0, 0, 200][rng.usize(..3)]);
        let probe = builder.attach_with(move |event| {
            place.lock().expect("one thread").note(event.to_event().span);
            thread::sleep(pause);
            left -= 1;
            if left == 0 {
                // As a panic, but silently.
                std::panic::resume_unwind(Box::new("enough"));
            }
        })?;
        return Ok((probe, Reading { who: Who::Callback(received), slow: true }));
    }
    let builder = if rng.bool() { builder.in_batches([1, 16, 1_000][rng.usize(..3)]) } else { builder };
    let probe = builder.attach()?;
    let (events, batches) = (probe.events().clone(), probe.batches().clone());
    let pause = Duration::from_micros([0, 50, 2_000][rng.usize(..3)]);
    let who = match rng.u8(0..3) {
        0 => Who::Late(events, batches),
        _ => Who::Thread(thread::spawn(move || read(&events, &batches, pause))),
    };
    Ok((probe, Reading { who, slow: wish.has_backpressure() }))
}

/// Until the end, slowly, but not for ever.
fn read(events: &Receiver<LatencyEvent>, batches: &Batches, pause: Duration) -> Received {
    let mut received = Received::default();
    let mut pauses = 100;
    let mut slowly = || {
        if pauses > 0 {
            pauses -= 1;
            thread::sleep(pause);
        }
    };
    for event in events {
        received.note(event.span);
        slowly();
    }
    for batch in batches {
        batch.iter().for_each(|event| received.note(event.span));
        slowly();
    }
    received
}
