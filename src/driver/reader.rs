//! The thread that reads what the programs write.

use std::cell::RefCell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, RingBuffer, RingBufferBuilder};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::intake::Intake;
use super::messages;
use super::rings::CpuRings;
use super::tally::Tally;
use super::{FIRST_KEY, SET, Shared, Watched, errno, system_error};
use crate::decode::Codec;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::wire::FULL;

/// Records taken in one go; after each go the wish to stop is looked at.
const GO: usize = 4096;
/// How long the reader waits at first; it doubles each time that it finds few records, or none.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
/// What the longest pause is at least, and at most. If the reader finds none by then it is idle: it asks to be woken by the
/// next record and sleeps.
const LONGEST_PAUSE_AT_LEAST: Duration = Duration::from_millis(4);
const LONGEST_PAUSE_AT_MOST: Duration = Duration::from_millis(16);
/// Asleep, it looks for the first time after this, and then twice as long after each look.
const FIRST_LOOK: Duration = Duration::from_millis(20);
/// The longest sleep,
const IDLE: Duration = Duration::from_secs(1);
/// and while events wait for the program to take others first.
const WATCHFUL: Duration = Duration::from_millis(100);
/// What the kernel's ring buffer keeps before each record (`BPF_RINGBUF_HDR_SZ`).
const RING_HEADER: usize = 8;
/// How often spans are relieved of what has expired.
const SWEEP: Duration = Duration::from_secs(2);

/// The reader thread. Dropping it stops it, after it has taken all that is there.
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

impl Stop {
    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }
}

impl Reader {
    /// Starts reading what comes through `shared`; `None` if nothing does, since nobody wants events.
    pub(crate) fn spawn(shared: &Shared, codec: Arc<Codec>, delivery: Delivery) -> Result<Option<Self>, Error> {
        let Some(ring) = &shared.ring else { return Ok(None) };
        let tally = Arc::new(Tally::new(codec.spans.len()));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            let errno = errno.raw_os_error();
            Error::system("creating an eventfd", errno).with_errno(errno)
        })?;
        let stop = Arc::new(Stop { wanted: AtomicBool::new(false), wake });
        let duplicate =
            |map| MapHandle::try_from(map).map_err(|error| system_error("duplicating a descriptor", &error));
        let (ring, wake_flag) = (duplicate(ring)?, duplicate(&shared.wake)?);
        let intake = Intake::new(codec, delivery, Arc::clone(&tally), Arc::clone(&shared.programs));
        let watched = Arc::clone(&shared.watched);
        let rings = shared.rings.as_ref().map(|rings| {
            let (slots, stride) = (rings.slots as usize, rings.stride as usize);
            CpuRings::map(&rings.map, shared.cpus as usize, rings.map.value_size() as usize, slots, stride)
        });
        let rings = rings.transpose().map_err(|errno| {
            let errno = errno.raw_os_error();
            Error::system("mapping the rings", errno).with_errno(errno)
        })?;

        // The thread maps the ring itself, since what it does with the records stays on it.
        let (ready, started) = bounded(1);
        let worker_stop = Arc::clone(&stop);
        let thread = Builder::new().name("dwell-reader".to_owned()).spawn(move || {
            let worker = Worker::new(&ring, rings, wake_flag, worker_stop, intake, watched);
            let _ = ready.send(worker.as_ref().map(|_| ()).map_err(errno));
            if let Ok(mut worker) = worker {
                worker.run();
            }
        });
        let thread = thread.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(0);
            Error::system("starting the reader thread", errno).with_errno(errno)
        })?;
        let reader = Self { thread: Some(thread), stop, tally };
        match started.recv() {
            Ok(Ok(())) => Ok(Some(reader)),
            Ok(Err(errno)) => Err(Error::system("mapping the ring buffer", errno).with_errno(errno)),
            Err(_) => Err(Error::system("starting the reader thread", 0)),
        }
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Takes what is there, closes the channel and ends. The probe must have been detached.
    pub(crate) fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.stop.wanted.store(true, Ordering::Release);
        // Can only fail if the counter is full, and then the reader wakes as well.
        let _ = rustix::io::write(&self.stop.wake, &1_u64.to_ne_bytes());
        // An error would be the thread's panic. It has been printed by then, and there is nothing to mend.
        let _ = thread.join();
    }

    /// Leaves the thread to the process that has it.
    pub(crate) fn abandon(&mut self) {
        // Of a thread that isn't there nothing can be asked, not even not to be waited for.
        std::mem::forget(self.thread.take());
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the thread owns.
struct Worker {
    /// The kernel's ring buffer. Where there are `rings`, it only wakes the reader.
    ring: RingBuffer<'static>,
    rings: Option<CpuRings>,
    /// So many records at once are a sign that the rings fill up.
    many: usize,
    /// In which a million records a second still find room, as far as may be.
    longest_pause: Duration,
    wake_flag: MapHandle,
    stop: Arc<Stop>,
    intake: Rc<RefCell<Intake>>,
    watched: Watched,
    /// When that was done last.
    swept: Instant,
}

impl Worker {
    fn new(
        kernel_ring: &MapHandle,
        rings: Option<CpuRings>,
        wake_flag: MapHandle,
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
            builder.add(kernel_ring, accept)?;
            builder.build()
        });
        let records_of_ring = || kernel_ring.max_entries() as usize / (RING_HEADER + FULL);
        let room = rings.as_ref().map_or_else(records_of_ring, CpuRings::slots);
        let longest_pause = Duration::from_micros(room as u64).clamp(LONGEST_PAUSE_AT_LEAST, LONGEST_PAUSE_AT_MOST);
        Ok(Self {
            ring: ring?,
            rings,
            many: room / 8,
            longest_pause,
            wake_flag,
            stop,
            intake,
            watched,
            swept: Instant::now(),
        })
    }

    fn run(&mut self) {
        let mut pause = SHORTEST_PAUSE;
        loop {
            self.sweep();
            // Asked before taking, so that once it is yes, what is left to take is the end.
            let stopping = self.stop.is_wanted();
            match self.take() {
                0 if stopping => return,
                // There may be more.
                taken if stopping || taken >= GO => {
                    pause = SHORTEST_PAUSE;
                    continue;
                }
                0 if pause == self.longest_pause => {
                    self.idle();
                    pause = SHORTEST_PAUSE;
                    continue;
                }
                // The longer the pauses, the less each record costs; but the rings mustn't get full.
                taken if taken > self.many => pause = SHORTEST_PAUSE,
                _ => {}
            }
            self.sleep(pause);
            pause = (pause * 2).min(self.longest_pause);
        }
    }

    /// Relieves spans of what has expired, if it is time.
    fn sweep(&mut self) {
        if self.swept.elapsed() < SWEEP {
            return;
        }
        self.swept = Instant::now();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|maps| maps.upgrade().inspect(|maps| maps.sweep()).is_some());
    }

    /// Takes [`GO`] records or a few more. How many it were; if fewer, then there are no more at the moment.
    fn take(&mut self) -> usize {
        if self.rings.as_mut().is_none_or(CpuRings::look) {
            self.intake.borrow_mut().look();
        }
        let mut taken = usize::try_from(self.ring.consume_raw_n(GO)).unwrap_or(0);
        let mut intake = self.intake.borrow_mut();
        if let Some(rings) = &mut self.rings {
            taken += intake.take(rings, GO);
        }
        if taken < GO {
            intake.flush();
        }
        taken
    }

    /// Sleeps until a record comes, or it is to stop.
    ///
    /// A program that read the wish to be woken just before it was made submits its record without waking. So the reader
    /// looks again, at longer and longer intervals: such a record waits at most as long as its program was held up.
    fn idle(&mut self) {
        self.ask_to_be_woken();
        let mut pause = FIRST_LOOK;
        while self.take() == 0 && !self.stop.is_wanted() {
            let longest = if self.intake.borrow().is_pending() { WATCHFUL } else { IDLE };
            if self.sleep_until_record(pause.min(longest)) {
                return;
            }
            pause = (pause * 2).min(IDLE);
            self.sweep();
        }
    }

    /// The program clears this as it wakes the reader.
    fn ask_to_be_woken(&self) {
        // An update of an array's element can't fail. If it did, the reader would find the record when it looks again.
        let _ = self.wake_flag.update(&FIRST_KEY, &SET, MapFlags::ANY);
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
