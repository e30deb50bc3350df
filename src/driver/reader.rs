//! The thread that reads the ring buffer and fills the channel.

use std::cell::{Cell, RefCell};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, RingBuffer, RingBufferBuilder};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::doubt::Doubt;
use super::messages;
use super::state::Programs;
use super::{Shared, Watched, errno, system_error};
use crate::decode::{Codec, Decoded};
use crate::error::Error;
use crate::event::{LatencyEvent, MonotonicTime, Outcome};
use crate::span::Key;
use crate::wire::Control;

/// Records taken in one go; after each go the wish to stop is looked at.
const BATCH: usize = 4096;
/// How long the reader waits after it found records; it doubles each time it finds none.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
/// From here on the reader is idle: it asks to be woken by the next record and sleeps.
const LONGEST_PAUSE: Duration = Duration::from_millis(32);
/// A program that read the wish to be woken just before it was made submits its record without waking. This is how
/// long the reader waits for such stragglers.
const SETTLE: Duration = Duration::from_millis(20);
/// The longest sleep.
const IDLE: Duration = Duration::from_secs(1);
/// How often spans are relieved of what has expired.
const SWEEP: Duration = Duration::from_secs(2);

/// The reader thread. Dropping it stops it, after it has taken all that is in the ring buffer.
#[derive(Debug)]
pub(crate) struct Reader {
    thread: Option<JoinHandle<()>>,
    stop: Arc<Stop>,
    tally: Arc<Tally>,
}

#[derive(Debug)]
struct Stop {
    wanted: AtomicBool,
    /// An eventfd, to interrupt the reader's sleep.
    wake: OwnedFd,
}

/// What became of the records.
#[derive(Debug)]
pub(crate) struct Tally {
    spans: Vec<SpanTally>,
    undecodable: AtomicU64,
}

/// What became of a span's records.
#[derive(Debug, Default)]
pub(crate) struct SpanTally {
    /// Put into the channel.
    pub(crate) delivered: AtomicU64,
    /// Found the channel full.
    pub(crate) channel_dropped: AtomicU64,
    /// Of no certain pair: completed spans.
    pub(crate) doubtful: AtomicU64,
    /// The same of abandoned ones.
    pub(crate) doubtful_abandoned: AtomicU64,
}

impl Tally {
    fn new(spans: usize) -> Self {
        Self { spans: (0..spans).map(|_| SpanTally::default()).collect(), undecodable: AtomicU64::new(0) }
    }

    /// Of the span number `index`, which there must be.
    pub(crate) fn span(&self, index: usize) -> &SpanTally {
        &self.spans[index]
    }

    pub(crate) fn undecodable(&self) -> u64 {
        self.undecodable.load(Ordering::Relaxed)
    }
}

impl Reader {
    /// Starts reading the ring of `shared`.
    pub(crate) fn spawn(shared: &Shared, codec: Codec, sender: Sender<LatencyEvent>) -> Result<Self, Error> {
        let tally = Arc::new(Tally::new(codec.spans.len()));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            let errno = errno.raw_os_error();
            Error::system("creating an eventfd", errno).with_errno(errno)
        })?;
        let stop = Arc::new(Stop { wanted: AtomicBool::new(false), wake });
        let duplicate =
            |map| MapHandle::try_from(map).map_err(|error| system_error("duplicating a descriptor", &error));
        let (ring, control) = (duplicate(&shared.ring)?, duplicate(&shared.control)?);
        let intake = Intake::new(codec, sender, Arc::clone(&tally), Arc::clone(&shared.programs));
        let watched = Arc::clone(&shared.watched);

        // The thread maps the ring itself, since what it does with the records stays on it.
        let (ready, started) = bounded(1);
        let worker_stop = Arc::clone(&stop);
        let thread = Builder::new().name("dwell-reader".to_owned()).spawn(move || {
            let worker = Worker::new(&ring, control, worker_stop, intake, watched);
            let _ = ready.send(worker.as_ref().map(|_| ()).map_err(errno));
            if let Ok(worker) = worker {
                worker.run();
            }
        });
        let thread = thread.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(0);
            Error::system("starting the reader thread", errno).with_errno(errno)
        })?;
        let reader = Self { thread: Some(thread), stop, tally };
        match started.recv() {
            Ok(Ok(())) => Ok(reader),
            Ok(Err(errno)) => Err(Error::system("mapping the ring buffer", errno).with_errno(errno)),
            Err(_) => Err(Error::system("starting the reader thread", 0)),
        }
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Takes what is in the ring buffer, closes the channel and ends. The probe must have been detached.
    pub(crate) fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.stop.wanted.store(true, Ordering::Release);
        // Can only fail if the counter is full, and then the reader wakes as well.
        let _ = rustix::io::write(&self.stop.wake, &1_u64.to_ne_bytes());
        // An error would be the thread's panic. It has been printed by then, and there is nothing to mend.
        let _ = thread.join();
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop();
    }
}

/// From a record to the channel.
struct Intake {
    codec: Codec,
    sender: Sender<LatencyEvent>,
    tally: Arc<Tally>,
    programs: Arc<Programs>,
    doubts: Vec<Doubt>,
    /// Spans of which there were records since the last `settle`.
    seen: Vec<bool>,
    /// From the first pair that isn't certain by itself on, so that events keep their order.
    held: Vec<Decoded>,
}

impl Intake {
    fn new(codec: Codec, sender: Sender<LatencyEvent>, tally: Arc<Tally>, programs: Arc<Programs>) -> Self {
        let doubts = codec.spans.iter().map(|_| Doubt::new()).collect();
        let seen = vec![false; codec.spans.len()];
        Self { codec, sender, tally, programs, doubts, seen, held: Vec::new() }
    }

    fn accept(&mut self, bytes: &[u8]) {
        let Ok(decoded) = self.codec.decode(bytes) else {
            self.tally.undecodable.fetch_add(1, Ordering::Relaxed);
            return;
        };
        self.seen[decoded.span] = self.codec.spans[decoded.span].doubted;
        if decoded.suspect || !self.held.is_empty() {
            self.held.push(decoded);
        } else {
            hand_over(decoded, &self.sender, &self.tally);
        }
    }

    /// After a go at the ring: decides on the pairs that were held.
    fn settle(&mut self) {
        // Also without any to decide on, so that a skip is known close to when it happened.
        for (span, seen) in self.seen.iter_mut().enumerate().filter(|(_, seen)| **seen) {
            let calls = self.codec.spans[span].key == Key::Call;
            let skipped = self.programs.skipped_in_doubt(span, calls);
            self.doubts[span].note(skipped, MonotonicTime::now());
            *seen = false;
        }
        for decoded in self.held.drain(..) {
            if !decoded.suspect || self.doubts[decoded.span].is_ruled_out(decoded.event.start) {
                hand_over(decoded, &self.sender, &self.tally);
            } else {
                let tally = &self.tally.spans[decoded.span];
                let completed = decoded.event.outcome == Outcome::Completed;
                let counter = if completed { &tally.doubtful } else { &tally.doubtful_abandoned };
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Never waits: a slow receiver costs events, not the kernel's time.
fn hand_over(decoded: Decoded, sender: &Sender<LatencyEvent>, tally: &Tally) {
    let tally = &tally.spans[decoded.span];
    let delivered = sender.try_send(decoded.event).is_ok();
    let counter = if delivered { &tally.delivered } else { &tally.channel_dropped };
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What the thread owns.
struct Worker {
    ring: RingBuffer<'static>,
    control: MapHandle,
    stop: Arc<Stop>,
    intake: Rc<RefCell<Intake>>,
    watched: Watched,
    /// When that was done last.
    swept: Cell<Instant>,
}

impl Worker {
    fn new(
        ring: &MapHandle,
        control: MapHandle,
        stop: Arc<Stop>,
        intake: Intake,
        watched: Watched,
    ) -> libbpf_rs::Result<Self> {
        let intake = Rc::new(RefCell::new(intake));
        let accept = {
            let intake = Rc::clone(&intake);
            move |bytes: &[u8]| {
                intake.borrow_mut().accept(bytes);
                0
            }
        };
        let (ring, _) = messages::captured(|| {
            let mut builder = RingBufferBuilder::new();
            builder.add(ring, accept)?;
            builder.build()
        });
        Ok(Self { ring: ring?, control, stop, intake, watched, swept: Cell::new(Instant::now()) })
    }

    fn run(&self) {
        let mut pause = SHORTEST_PAUSE;
        loop {
            self.sweep();
            // Asked before taking, so that once it is yes, an empty ring is the end.
            let stopping = self.stop.wanted.load(Ordering::Acquire);
            if self.take() {
                pause = SHORTEST_PAUSE;
                continue;
            }
            if stopping {
                return;
            }
            if pause <= LONGEST_PAUSE {
                self.sleep(pause);
                pause *= 2;
            } else {
                self.idle();
                pause = SHORTEST_PAUSE;
            }
        }
    }

    /// Relieves spans of what has expired, if it is time.
    fn sweep(&self) {
        if self.swept.get().elapsed() < SWEEP {
            return;
        }
        self.swept.set(Instant::now());
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|maps| maps.upgrade().inspect(|maps| maps.sweep()).is_some());
    }

    /// Takes up to [`BATCH`] records; whether there may be more at once.
    fn take(&self) -> bool {
        let any = self.ring.consume_raw_n(BATCH) > 0;
        if any {
            self.intake.borrow_mut().settle();
        }
        any
    }

    /// Sleeps until a record comes, or for [`IDLE`].
    fn idle(&self) {
        loop {
            self.sweep();
            self.ask_to_be_woken();
            for patience in [SETTLE, IDLE] {
                if self.take() || self.sleep_until_record(patience) || self.stop.wanted.load(Ordering::Acquire) {
                    return;
                }
            }
        }
    }

    /// The program clears this as it wakes the reader.
    fn ask_to_be_woken(&self) {
        // If this fails the reader isn't woken, and finds the record after IDLE.
        let _ = self.control.update(&Control::Wake.key(), &Control::SET, MapFlags::ANY);
    }

    fn sleep(&self, pause: Duration) {
        wait(&mut [PollFd::new(&self.stop.wake, PollFlags::IN)], pause);
    }

    /// Whether it was woken before the time was up.
    #[expect(unsafe_code, reason = "libbpf-rs gives the epoll descriptor as a number")]
    fn sleep_until_record(&self, pause: Duration) -> bool {
        // SAFETY: the ring buffer owns the descriptor, and lives as long as `self`.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) };
        let mut fds = [PollFd::new(&self.stop.wake, PollFlags::IN), PollFd::from_borrowed_fd(ring, PollFlags::IN)];
        wait(&mut fds, pause)
    }
}

/// Whether something happened on one of `fds` before the time was up. A signal counts as something.
fn wait(fds: &mut [PollFd<'_>], pause: Duration) -> bool {
    let timeout = Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: pause.subsec_nanos().into() };
    poll(fds, Some(&timeout)) != Ok(0)
}
