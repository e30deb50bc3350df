//! What libbpf has to say: kept from stderr, put into errors, and offered to a hook.
//!
//! libbpf has one print callback for the whole process. It is ours only while this crate calls libbpf, and what other
//! threads' libbpf says in the meantime goes on to the callback that was there before.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::{PrintCallback, PrintLevel, set_print};

/// How much a message of libbpf matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LibbpfLevel {
    /// Something failed.
    Warn,
    /// Something worth knowing.
    Info,
    /// Each step.
    Debug,
}

/// Takes libbpf's messages; see [`set_libbpf_log`].
pub type LibbpfLog = fn(LibbpfLevel, &str);

static HOOK: Mutex<Option<LibbpfLog>> = Mutex::new(None);
/// Held while the print callback is ours.
static TURN: Mutex<()> = Mutex::new(());
/// The callback that was there before ours.
static PREVIOUS: Mutex<Option<(PrintLevel, PrintCallback)>> = Mutex::new(None);

thread_local! {
    /// The messages of this thread's calls; `None` while it makes none.
    static CAPTURED: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Has what libbpf says, while this crate uses it, passed to `hook`; `None`, the default, has it said to nobody.
///
/// For the whole process, from the next [`attach`](crate::LatencyProbeBuilder::attach) on. The hook is called on the
/// thread that attaches, or that reads for it, with everything down to [`LibbpfLevel::Debug`]; it must not attach a
/// probe itself. A program's own libbpf print callback is left as it is. What matters for a failure is in the
/// [`Error`](crate::Error) anyway.
///
/// ```
/// dwell::set_libbpf_log(Some(|level, message| eprint!("libbpf {level:?}: {message}")));
/// # dwell::set_libbpf_log(None);
/// ```
pub fn set_libbpf_log(hook: Option<LibbpfLog>) {
    *lock(&HOOK) = hook;
}

/// Runs `work`, which may call libbpf, and returns the warnings that it caused with its result.
///
/// Calls don't nest.
pub(super) fn captured<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    let _turn = lock(&TURN);
    let hook = *lock(&HOOK);
    CAPTURED.set(Some(Vec::new()));
    let level = if hook.is_some() { PrintLevel::Debug } else { PrintLevel::Info };
    // Noted before ours is in force, so that no message of another thread is lost between.
    *lock(&PREVIOUS) = libbpf_rs::get_print();
    let previous = Restore(set_print(Some((level, receive))));
    let result = work();
    drop(previous);
    (result, CAPTURED.take().unwrap_or_default())
}

/// Puts the print callback back, whatever happens.
struct Restore(Option<(PrintLevel, PrintCallback)>);

impl Drop for Restore {
    fn drop(&mut self) {
        set_print(self.0);
    }
}

fn receive(level: PrintLevel, message: String) {
    let ours = CAPTURED.with_borrow_mut(|captured| match captured {
        Some(lines) => {
            if level == PrintLevel::Warn {
                lines.extend(message.lines().map(str::to_owned));
            }
            true
        }
        None => false,
    });
    if !ours {
        let previous = *lock(&PREVIOUS);
        if let Some((_, print)) = previous.filter(|(most, _)| level <= *most) {
            print(level, message);
        }
        return;
    }
    let hook = *lock(&HOOK);
    if let Some(hook) = hook {
        let level = match level {
            PrintLevel::Warn => LibbpfLevel::Warn,
            PrintLevel::Info => LibbpfLevel::Info,
            PrintLevel::Debug => LibbpfLevel::Debug,
        };
        // C code is above us on the stack, and a panic may not cross it.
        let _ = catch_unwind(AssertUnwindSafe(|| hook(level, &message)));
    }
}

/// These mutexes guard single values, which a panic leaves whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
