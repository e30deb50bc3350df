//! The thread that reads the ring buffer and fills the channel.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crossbeam_channel::Sender;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, RingBuffer, RingBufferBuilder};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::messages;
use super::{FIRST_KEY, Maps};
use crate::decode::{SpanKind, decode};
use crate::error::Error;
use crate::event::LatencyEvent;
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

/// What became of the records, counted by span.
#[derive(Debug)]
pub(crate) struct Tally {
    spans: Vec<SpanTally>,
    undecodable: AtomicU64,
}

#[derive(Debug, Default)]
struct SpanTally {
    delivered: AtomicU64,
    channel_dropped: AtomicU64,
}

impl Tally {
    fn new(spans: usize) -> Self {
        Self { spans: (0..spans).map(|_| SpanTally::default()).collect(), undecodable: AtomicU64::new(0) }
    }

    /// Events of a span put into the channel, and those that found it full.
    pub(crate) fn of(&self, span: usize) -> (u64, u64) {
        self.spans.get(span).map_or((0, 0), |tally| {
            (tally.delivered.load(Ordering::Relaxed), tally.channel_dropped.load(Ordering::Relaxed))
        })
    }

    pub(crate) fn undecodable(&self) -> u64 {
        self.undecodable.load(Ordering::Relaxed)
    }

    fn hand_over(&self, bytes: &[u8], spans: &[SpanKind], sender: &Sender<LatencyEvent>) {
        let Ok((span, event)) = decode(bytes, spans) else {
            self.undecodable.fetch_add(1, Ordering::Relaxed);
            return;
        };
        // Never waits: a slow receiver costs events, not the kernel's time.
        let delivered = sender.try_send(event).is_ok();
        let tally = &self.spans[span];
        let counter = if delivered { &tally.delivered } else { &tally.channel_dropped };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Reader {
    /// Starts reading the ring of `maps`.
    pub(crate) fn spawn(maps: &Maps, spans: Vec<SpanKind>, sender: Sender<LatencyEvent>) -> Result<Self, Error> {
        let tally = Arc::new(Tally::new(spans.len()));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            Error::system("creating an eventfd", errno.raw_os_error()).with_errno(errno.raw_os_error())
        })?;
        let stop = Arc::new(Stop { wanted: AtomicBool::new(false), wake });
        let ring = {
            let tally = Arc::clone(&tally);
            build_ring(&maps.ring, move |bytes| tally.hand_over(bytes, &spans, &sender))?
        };
        let control = MapHandle::try_from(&maps.control)
            .map_err(|error| super::system_error("duplicating a map's descriptor", &error))?;
        let worker = Worker { ring, control, stop: Arc::clone(&stop) };
        let thread = Builder::new().name("dwell-reader".to_owned()).spawn(move || worker.run());
        let thread =
            thread.map_err(|error| Error::system("starting the reader thread", error.raw_os_error().unwrap_or(0)))?;
        Ok(Self { thread: Some(thread), stop, tally })
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

fn build_ring(map: &MapHandle, mut take: impl FnMut(&[u8]) + 'static) -> Result<RingBuffer<'static>, Error> {
    let (ring, _) = messages::captured(|| {
        let mut builder = RingBufferBuilder::new();
        builder.add(map, move |bytes| {
            take(bytes);
            0
        })?;
        builder.build()
    });
    ring.map_err(|error| super::system_error("mapping the ring buffer", &error))
}

/// What the thread owns.
struct Worker {
    ring: RingBuffer<'static>,
    control: MapHandle,
    stop: Arc<Stop>,
}

impl Worker {
    fn run(&self) {
        let mut pause = SHORTEST_PAUSE;
        loop {
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

    /// Takes up to [`BATCH`] records; whether there may be more at once.
    fn take(&self) -> bool {
        self.ring.consume_raw_n(BATCH) > 0
    }

    /// Sleeps until a record comes, or for [`IDLE`].
    fn idle(&self) {
        loop {
            self.ask_to_be_woken();
            for patience in [SETTLE, IDLE] {
                if self.take() || self.sleep_until_record(patience) || self.stop.wanted.load(Ordering::Acquire) {
                    return;
                }
            }
        }
    }

    /// Sets `struct dwell_control`'s `wake`, which the program clears as it wakes the reader.
    fn ask_to_be_woken(&self) {
        let control = Control { wake: 1, reserved: 0 };
        // If this fails the reader isn't woken, and finds the record after IDLE.
        let _ = self.control.update(&FIRST_KEY, control.as_bytes(), MapFlags::ANY);
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
