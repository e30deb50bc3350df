//! The thread that reads what the programs write.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, RingBuffer, RingBufferBuilder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::intake::{FromRings, Intake, One};
use super::messages;
use super::rings::CpuRings;
use super::stop::Stop;
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

/// Stopped, the reader waits so long for a program that is to take events first, or for a callback,
const GRACE: Duration = Duration::from_millis(500);
/// and then it is waited for this much longer.
const LAST_GRACE: Duration = Duration::from_millis(250);

/// The reader thread. Dropping it stops it, after it has taken all that is there.
#[derive(Debug)]
pub(crate) struct Reader {
    thread: Option<JoinHandle<()>>,
    /// Closed when the thread has ended.
    ended: Receiver<Result<(), i32>>,
    stop: Arc<Stop>,
    /// Whether the reader may have to wait for the program.
    patient: bool,
    tally: Arc<Tally>,
    abandoned: bool,
}

impl Reader {
    /// Starts reading what comes through `shared`; `None` if nothing does, since nobody wants events.
    pub(crate) fn spawn(shared: &Shared, codec: Arc<Codec>, delivery: Delivery) -> Result<Option<Self>, Error> {
        let Some(ring) = &shared.ring else { return Ok(None) };
        let tally = Arc::new(Tally::new(codec.spans.len()));
        let stop = Arc::new(Stop::new()?);
        let duplicate =
            |map| MapHandle::try_from(map).map_err(|error| system_error("duplicating a descriptor", &error));
        let (ring, wake_flag) = (duplicate(ring)?, duplicate(&shared.wake)?);
        let patient = delivery.is_patient();
        let intake = Intake::new(codec, delivery, Arc::clone(&tally), Arc::clone(&shared.programs), Arc::clone(&stop));
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
        let (ready, ended) = bounded(1);
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
        let reader = Self { thread: Some(thread), ended, stop, patient, tally, abandoned: false };
        match reader.ended.recv() {
            Ok(Ok(())) => Ok(Some(reader)),
            Ok(Err(errno)) => Err(Error::system("mapping the ring buffer", errno).with_errno(errno)),
            Err(_) => Err(Error::system("starting the reader thread", 0)),
        }
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Takes what is there, closes the channel and ends. The probe must have been detached.
    ///
    /// Without a program that lets it wait, the reader is done as soon as the rings are empty. Else, when its time is up,
    /// it counts what is left; and if not even that, since a callback doesn't return, it is left to itself.
    pub(crate) fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.stop.want();
        // A callback that stops its own probe.
        let itself = thread.thread().id() == thread::current().id();
        if itself || (self.patient && !self.has_ended_within(GRACE)) {
            self.stop.hurry();
            if itself || !self.has_ended_within(LAST_GRACE) {
                self.abandoned = true;
                return;
            }
        }
        // An error would be the thread's panic. It has been printed by then, and there is nothing to mend.
        let _ = thread.join();
    }

    fn has_ended_within(&self, time: Duration) -> bool {
        self.ended.recv_timeout(time) == Err(RecvTimeoutError::Disconnected)
    }

    /// Whether it was stopped while a callback held it up, so that some records may not have been counted.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned
    }

    /// Leaves the thread to the process that has it.
    pub(crate) fn disown(&mut self) {
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
                intake.borrow_mut().take(&mut One(bytes));
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
            let limit = GO.min(self.intake.borrow().room());
            if limit == 0 {
                self.wait_for_room(pause, stopping);
                pause = (pause * 2).min(self.longest_pause);
                continue;
            }
            match self.take(limit) {
                0 if stopping => return,
                // There may be more.
                taken if stopping || taken >= limit => {
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

    /// Takes `limit` records. How many it were; if fewer, then there are no more at the moment.
    fn take(&mut self, limit: usize) -> usize {
        if self.rings.as_mut().is_none_or(CpuRings::look) {
            self.intake.borrow_mut().look();
        }
        let mut taken = usize::try_from(self.ring.consume_raw_n(limit)).unwrap_or(0);
        let mut intake = self.intake.borrow_mut();
        if let Some(rings) = &mut self.rings {
            taken += intake.take(&mut FromRings(rings, limit));
        }
        if taken < limit {
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
        // There is room, or it wouldn't be idle, and nobody else fills it.
        while self.take(1) == 0 && !self.stop.is_wanted() {
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
        wait(&mut [PollFd::new(&*self.stop, PollFlags::IN)], pause);
    }

    /// Lets the program read what it has been sent.
    fn wait_for_room(&self, pause: Duration, stopping: bool) {
        // What would wake it has done so already.
        if stopping { thread::sleep(SHORTEST_PAUSE) } else { self.sleep(pause) }
    }

    /// Whether it was woken before the time was up.
    #[expect(unsafe_code, reason = "libbpf-rs gives the epoll descriptor as a number")]
    fn sleep_until_record(&self, pause: Duration) -> bool {
        // SAFETY: the ring buffer owns the descriptor, and lives as long as `self`.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) };
        let mut fds = [PollFd::new(&*self.stop, PollFlags::IN), PollFd::from_borrowed_fd(ring, PollFlags::IN)];
        wait(&mut fds, pause)
    }
}

/// Whether something happened on one of `fds` before the time was up. A signal counts as something.
fn wait(fds: &mut [PollFd<'_>], pause: Duration) -> bool {
    let timeout = Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: pause.subsec_nanos().into() };
    poll(fds, Some(&timeout)) != Ok(0)
}
