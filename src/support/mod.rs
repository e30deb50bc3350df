//! What can be measured on this machine, by this process.

mod judge;

use std::fmt;

use crate::error::Capability;

/// What this process can measure on this machine; where it can't, why, and what to do.
///
/// Found out by trying: small programs are loaded, attached where nothing happens, and taken away again. Nothing is
/// taken from a version number, except as an explanation.
///
/// The `Display` text is for people. For programs there are [`checks`](Support::checks), whose names and answers
/// are fixed words; the example `doctor` makes JSON of them.
///
/// ```
/// use dwell::{Feature, Support};
///
/// let support = Support::probe();
/// if !support.can_trace_functions() {
///     for check in support.checks() {
///         println!("{}: {}: {}", check.feature, check.answer, check.cause);
///     }
/// }
/// let sessions = support.has(Feature::Sessions);
/// # let _ = sessions;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Support {
    kernel: String,
    architecture: String,
    checks: Vec<Check>,
}

/// One thing that measuring may need, and whether it can be had.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// What was looked for.
    pub feature: Feature,
    /// Whether this process can use it here.
    pub answer: Answer,
    /// How that was found, or why it is so. Never empty, and one line.
    pub cause: String,
    /// What to do about it, if there is anything to do. What isn't needed has no remedy.
    pub remedy: Option<String>,
}

/// What measuring may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// The kernel describes its types and functions. Functions can't be traced without.
    Btf,
    /// fentry and fexit programs, by which functions are traced.
    Trampolines,
    /// One program for entry and exit (fsession), from Linux 7.0 on. Not needed.
    Sessions,
    /// Programs on the kernel's tracepoints, which identify a packet by its address.
    RawTracepoints,
    /// The same with typed arguments (tp_btf), through which the packet can be read. Not needed.
    TypedTracepoints,
    /// The kernel's ring buffer, tried with 4 MiB: before Linux 5.12 events come through it, later it wakes the reader.
    /// Without, only histograms can be had.
    RingBuffer,
    /// Atomic compare-and-swap in programs, from Linux 5.12 on. Without, calls in flight wait in a hash map, which costs
    /// each call several hundred nanoseconds more, and all CPUs share one ring for events.
    AtomicTable,
    /// The kernel describes its modules' functions as well: otherwise only functions of the kernel itself can be traced.
    ModuleBtf,
    /// A capability of this process. `CAP_SYS_ADMIN` stands for `CAP_BPF` and `CAP_PERFMON`. The report has those that
    /// attaching may take.
    Capability(Capability),
    /// The process isn't in a user namespace of its own, where its capabilities don't count for tracing.
    InitialUserNamespace,
    /// The kernel is locked down. Good to know where something is refused; it isn't needed, and doesn't hinder by
    /// itself.
    Lockdown,
}

impl Feature {
    /// Its name in `snake_case`: `ring_buffer`, `cap_bpf`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Btf => "btf",
            Self::Trampolines => "trampolines",
            Self::Sessions => "sessions",
            Self::RawTracepoints => "raw_tracepoints",
            Self::TypedTracepoints => "typed_tracepoints",
            Self::RingBuffer => "ring_buffer",
            Self::AtomicTable => "atomic_table",
            Self::ModuleBtf => "module_btf",
            Self::Capability(Capability::Bpf) => "cap_bpf",
            Self::Capability(Capability::Perfmon) => "cap_perfmon",
            Self::Capability(Capability::SysAdmin) => "cap_sys_admin",
            Self::Capability(Capability::SysPtrace) => "cap_sys_ptrace",
            Self::Capability(Capability::SysResource) => "cap_sys_resource",
            Self::InitialUserNamespace => "initial_user_namespace",
            Self::Lockdown => "lockdown",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Whether this process can use something here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Answer {
    /// It can.
    Yes,
    /// It can't, whether for the kernel's sake or for the process's; the cause says which.
    No,
    /// It couldn't be found out.
    Unknown,
}

impl Answer {
    /// `yes`, `no` or `unknown`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Support {
    /// Finds out, which takes a fraction of a second. It never fails: that something is refused is an answer.
    ///
    /// Nothing stays loaded or attached, and no traffic is changed.
    ///
    /// ```
    /// let support = dwell::Support::probe();
    /// println!("{support}");
    /// assert!(support.checks().iter().all(|check| !check.cause.is_empty()));
    /// ```
    pub fn probe() -> Self {
        let uname = rustix::system::uname();
        Self {
            kernel: uname.release().to_string_lossy().into_owned(),
            architecture: uname.machine().to_string_lossy().into_owned(),
            checks: judge::Facts::gather().judge(),
        }
    }

    /// The kernel's release, as `uname -r` says it.
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// The machine's architecture, as `uname -m` says it: `x86_64`, `aarch64`.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Everything that was looked for, always in the same order.
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// The check of one feature.
    pub fn get(&self, feature: Feature) -> Option<&Check> {
        self.checks.iter().find(|check| check.feature == feature)
    }

    /// Whether a feature was found for certain.
    pub fn has(&self, feature: Feature) -> bool {
        self.get(feature).is_some_and(|check| check.answer == Answer::Yes)
    }

    /// Whether functions can be traced, so that [`attach`](crate::LatencyProbeBuilder::attach) works for any function
    /// that can be traced at all.
    pub fn can_trace_functions(&self) -> bool {
        self.has(Feature::Btf) && self.has(Feature::Trampolines) && self.has(Feature::RingBuffer)
    }

    /// Whether packets can be followed from tracepoint to tracepoint, by their address. That is so on many machines which
    /// refuse to have functions traced. (The kernel's type information says which argument of a tracepoint the packet is.)
    pub fn can_trace_packets(&self) -> bool {
        self.has(Feature::RawTracepoints) && self.has(Feature::RingBuffer) && self.has(Feature::Btf)
    }
}

/// A summary, a line for each check, and at the end what to do.
impl fmt::Display for Support {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes_no = |yes| if yes { "yes" } else { "no" };
        writeln!(f, "Linux {}, {}", self.kernel, self.architecture)?;
        writeln!(f)?;
        writeln!(f, "Functions can be traced: {}", yes_no(self.can_trace_functions()))?;
        writeln!(f, "Packets can be followed: {}", yes_no(self.can_trace_packets()))?;
        for check in &self.checks {
            write!(f, "\n  {:<22}  {:<7}  {}", check.feature, check.answer, check.cause)?;
        }
        let mut remedies: Vec<(&str, Vec<&str>)> = Vec::new();
        for check in &self.checks {
            let Some(remedy) = check.remedy.as_deref() else { continue };
            match remedies.iter_mut().find(|(known, _)| *known == remedy) {
                Some((_, features)) => features.push(check.feature.name()),
                None => remedies.push((remedy, vec![check.feature.name()])),
            }
        }
        if !remedies.is_empty() {
            write!(f, "\n\nWhat to do:")?;
        }
        for (remedy, features) in remedies {
            write!(f, "\n  - {remedy}\n    (for {})", some_of(&features))?;
        }
        Ok(())
    }
}

/// So that a line stays one: `a, b, c and 5 more`.
fn some_of(names: &[&str]) -> String {
    const SHOWN: usize = 4;
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn support(checks: &[(Feature, Answer, Option<&str>)]) -> Support {
        let check = |&(feature, answer, remedy): &(Feature, Answer, Option<&str>)| Check {
            feature,
            answer,
            cause: format!("the cause of {}", feature.name()),
            remedy: remedy.map(str::to_owned),
        };
        Support { kernel: "6.12".into(), architecture: "x86_64".into(), checks: checks.iter().map(check).collect() }
    }

    /// Lines are aligned, and each remedy is given once.
    #[test]
    fn text() {
        let support = support(&[
            (Feature::Btf, Answer::Yes, None),
            (Feature::Trampolines, Answer::No, Some("do this")),
            (Feature::RawTracepoints, Answer::Yes, None),
            (Feature::RingBuffer, Answer::Yes, None),
            (Feature::Sessions, Answer::No, Some("do this")),
            (Feature::InitialUserNamespace, Answer::Unknown, Some("do that")),
        ]);
        let expected = "\
Linux 6.12, x86_64

Functions can be traced: no
Packets can be followed: yes

  btf                     yes      the cause of btf
  trampolines             no       the cause of trampolines
  raw_tracepoints         yes      the cause of raw_tracepoints
  ring_buffer             yes      the cause of ring_buffer
  sessions                no       the cause of sessions
  initial_user_namespace  unknown  the cause of initial_user_namespace

What to do:
  - do this
    (for trampolines, sessions)
  - do that
    (for initial_user_namespace)";
        assert_eq!(support.to_string(), expected);
    }

    /// Of many features that one remedy is for, some are named.
    #[test]
    fn many_features() {
        assert_eq!(some_of(&["a"; 4]), "a, a, a, a");
        assert_eq!(some_of(&["a"; 6]), "a, a, a, a and 2 more");
    }

    /// Only what was found for certain counts, and everything that is needed must be.
    #[test]
    fn summary() {
        use Feature::{Btf, RawTracepoints, RingBuffer, Trampolines};
        for (missing, functions, packets) in [
            (None, true, true),
            (Some(Btf), false, false),
            (Some(Trampolines), false, true),
            (Some(RawTracepoints), true, false),
            (Some(RingBuffer), false, false),
        ] {
            for answer in [Answer::No, Answer::Unknown] {
                let checks = [Btf, Trampolines, RawTracepoints, RingBuffer].map(|feature| {
                    let answer = if missing == Some(feature) { answer } else { Answer::Yes };
                    (feature, answer, None)
                });
                let support = support(&checks);
                let summary = (support.can_trace_functions(), support.can_trace_packets());
                assert_eq!(summary, (functions, packets), "{missing:?}");
            }
        }
        assert!(!support(&[]).can_trace_functions() && !support(&[]).can_trace_packets());
    }
}
