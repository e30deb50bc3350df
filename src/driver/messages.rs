//! What libbpf has to say: kept from stderr, put into errors, and offered to a hook.
//!
//! libbpf has one print callback for the whole process. It is ours only while threads of this crate call libbpf, and what
//! other threads' libbpf says in the meantime goes on to the callback that was there before.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::{PrintCallback, PrintLevel, set_print};

use super::signals::Blocked;

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
static INSTALLED: Mutex<Installed> = Mutex::new(Installed { by: 0, previous: None });

/// The print callback is ours while it isn't installed by nobody.
struct Installed {
    /// Calls of [`captured`] that are under way.
    by: usize,
    /// The callback that was there before the first of them.
    previous: Option<(PrintLevel, PrintCallback)>,
}

thread_local! {
    /// The messages of this thread's calls; `None` while it makes none.
    static CAPTURED: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Has what libbpf says, while this crate uses it, passed to `hook`; `None`, the default, has it said to nobody.
///
/// For the whole process, from the next [`attach`](crate::LatencyProbeBuilder::attach) on. The hook is called with
/// everything down to [`LibbpfLevel::Debug`], on the threads that attach, which may be several at once, or that read for
/// it; it must not attach a probe itself. A program's own libbpf print callback is left as it is. What matters for a
/// failure is in the [`Error`](crate::Error) anyway.
///
/// ```
/// dwell::set_libbpf_log(Some(|level, message| eprint!("libbpf {level:?}: {message}")));
/// # dwell::set_libbpf_log(None);
/// ```
pub fn set_libbpf_log(hook: Option<LibbpfLog>) {
    *lock(&HOOK) = hook;
}

/// Runs `work`, which may call libbpf, undisturbed by signals, and returns the warnings that it caused with its result.
///
/// Calls don't nest.
pub(super) fn captured<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    let _undisturbed = Blocked::new();
    let hook = *lock(&HOOK);
    CAPTURED.set(Some(Vec::new()));
    let installation = Installation::new(if hook.is_some() { PrintLevel::Debug } else { PrintLevel::Info });
    let result = work();
    drop(installation);
    (result, CAPTURED.take().unwrap_or_default())
}

/// What the kernel's verifier had against a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rejection {
    pub(super) program: String,
    /// The line that says why.
    pub(super) verdict: String,
    /// The last lines, that one among them.
    pub(super) log: Vec<String>,
}

/// How many last lines are kept.
const LOG_LINES: usize = 20;
/// And of the verifier's, if it takes more of them to explain its verdict.
const MOST_LINES: usize = 64;

impl Rejection {
    /// Found among libbpf's messages; `None`: the verifier said nothing, or had nothing to do with it.
    pub(super) fn find(messages: &[String]) -> Option<Self> {
        const END: &str = "-- END PROG LOAD LOG --";
        let begin = messages.iter().rposition(|line| line.ends_with("-- BEGIN PROG LOAD LOG --"))?;
        let program = messages[begin].split('\'').nth(1)?;
        let said = messages[begin + 1..].iter().map(|line| line.split(END).next().unwrap_or_default());
        // If its last line doesn't end, libbpf goes on behind it.
        let count = messages[begin + 1..].iter().position(|line| line.ends_with(END)).map_or(usize::MAX, |end| end + 1);
        let said: Vec<_> = said.take(count).filter(|line| !line.trim().is_empty()).collect();
        // It is the first line behind the instructions. Newer kernels (7.x) explain it at length; what it has cost comes last.
        let behind = said.iter().rposition(|line| is_trace(line)).map_or(0, |last| last + 1);
        let at = behind.min(said.len().checked_sub(1)?);
        let from = said.len().saturating_sub(LOG_LINES).min(at);
        let log = said[from..].iter().take(MOST_LINES).map(|&line| line.to_owned()).collect();
        Some(Self { program: program.to_owned(), verdict: said[at].trim().to_owned(), log })
    }
}

/// Whether a line of the verifier's says where it is: an instruction or what it knows there (`4: R0=0 ...`), a line of
/// source (`; ...`), or which way it has come (`from 3 to 7: ...`).
fn is_trace(line: &str) -> bool {
    let is_numbered = line.split_once(':').is_some_and(|(number, _)| number.parse::<u32>().is_ok());
    is_numbered || line.starts_with("; ") || line.starts_with("from ")
}

/// The last lines of libbpf's messages.
pub(super) fn last_lines(messages: &[String]) -> Vec<String> {
    messages[messages.len().saturating_sub(LOG_LINES)..].to_vec()
}

/// As long as it lives, the print callback is ours. Who is the last puts the other back, whatever happens.
struct Installation;

impl Installation {
    fn new(level: PrintLevel) -> Self {
        let mut installed = lock(&INSTALLED);
        // Noted before ours is in force, so that no message of another thread is lost between.
        if installed.by == 0 {
            installed.previous = libbpf_rs::get_print();
        }
        installed.by += 1;
        set_print(Some((level, receive)));
        Self
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        let mut installed = lock(&INSTALLED);
        installed.by -= 1;
        if installed.by == 0 {
            set_print(installed.previous);
        }
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
        let previous = lock(&INSTALLED).previous;
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

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::time::Duration;
    use std::{ptr, thread};

    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    /// What the verifier said is found among what libbpf says: why, of which program, and no more than the end of it.
    #[test]
    fn rejections() {
        let told = "libbpf: prog 'call_exit': BPF program load failed: -EACCES\n\
                    libbpf: prog 'call_exit': -- BEGIN PROG LOAD LOG --\n\
                    0: R1=ctx() R10=fp0\n; return 0; @ call.bpf.c:1\n0: (79) r0 = *(u64 *)(r1 +800)\n\
                    invalid bpf_context access off=800 size=8\n\
                    processed 1 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0\n\
                    -- END PROG LOAD LOG --\nlibbpf: prog 'call_exit': failed to load: -EACCES\n\
                    libbpf: failed to load object 'call_bpf'\n";
        let rejection = Rejection::find(&lines(told)).unwrap();
        assert_eq!((&*rejection.program, rejection.log.len()), ("call_exit", 5));
        assert_eq!(rejection.verdict, "invalid bpf_context access off=800 size=8");
        assert!(rejection.log[0] == "0: R1=ctx() R10=fp0" && rejection.log[4].starts_with("processed 1 insns"));

        let begin = "libbpf: prog 'p': -- BEGIN PROG LOAD LOG --";
        let long: String = (0..100).map(|n| format!("{n}: (b7) r0 = 0\n")).collect();
        let of = |explanation: &str| {
            let text = format!("{begin}\n{long}R1 isn't\n{explanation}processed 1 insns\n-- END PROG LOAD LOG --\n");
            let Rejection { verdict, log, .. } = Rejection::find(&lines(&text)).unwrap();
            assert_eq!(verdict, "R1 isn't");
            (log.len(), log[0].clone())
        };
        assert_eq!(of(""), (20, "82: (b7) r0 = 0".to_owned()));
        // As Linux 7.x puts it.
        let explained = "\nReason:\n  R1 is another.\nAt:\n  insn 1\n       | ^-- error: of R1\n  >>> 1 | (79) r2 = *(u64 *)(r1 +0)\n";
        assert_eq!(of(explained), (20, "88: (b7) r0 = 0".to_owned()));
        assert_eq!(of(&explained.repeat(5)), (32, "R1 isn't".to_owned()));
        assert_eq!(of(&explained.repeat(100)), (64, "R1 isn't".to_owned()));
        // Without an end, or with one that isn't on a line of its own.
        for text in [format!("{begin}\nno"), format!("{begin}\nno-- END PROG LOAD LOG --\nlibbpf: more")] {
            assert_eq!(Rejection::find(&lines(&text)).unwrap().log, ["no"]);
        }
        for text in ["", "libbpf: failed to find valid kernel BTF", begin, &format!("{begin}\n-- END PROG LOAD LOG --")]
        {
            assert_eq!(Rejection::find(&lines(text)), None, "{text}");
        }
    }

    /// Threads that use libbpf at the same time get what they caused themselves, and the last takes our callback away.
    #[test]
    fn apart_by_thread() {
        let (begun, done) = (Barrier::new(8), Barrier::new(8));
        thread::scope(|scope| {
            for n in 0..8 {
                let (begun, done) = (&begun, &done);
                scope.spawn(move || {
                    let path = format!("/no/such/object/{n}");
                    let (opened, log) = captured(|| {
                        begun.wait();
                        let opened = libbpf_rs::ObjectBuilder::default().open_file(&path).map(drop);
                        done.wait();
                        opened
                    });
                    assert!(opened.is_err());
                    assert!(!log.is_empty() && log.iter().all(|line| line.contains(&path)), "{path}: {log:?}");
                });
            }
        });
        // Other tests may be at it in this process.
        let is_ours =
            || libbpf_rs::get_print().is_some_and(|(_, print)| ptr::fn_addr_eq(print, receive as PrintCallback));
        for _ in 0..1000 {
            if !is_ours() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("the print callback is still ours");
    }
}
