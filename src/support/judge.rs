//! From what was found to answers, causes and remedies.

use super::{Answer, Check, Feature};
use crate::driver::trials::{self, Refusal, Trial};
use crate::driver::{EBUSY, ENODEV, EPERM};
use crate::error::{Capability, ENOTSUPP, Error, Lockdown, NO_TRAMPOLINES};
use crate::kernel::{self, FunctionTracer};

/// As large as a probe's is by default: on some kernels the size decides.
const RING_BYTES: u32 = 4 << 20;

const ENOENT: i32 = 2;
const ESRCH: i32 = 3;
const EACCES: i32 = 13;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;
const EOPNOTSUPP: i32 = 95;

const AS_ROOT: &str = "run it as root (in a container: with --cap-add BPF --cap-add PERFMON), or allow it with \
                       `sudo setcap cap_bpf,cap_perfmon=ep PROGRAM`";
const OUTSIDE: &str = "run it outside its user namespace: on the host, or in a container that isn't rootless";
const MORE_LOCKED_MEMORY: &str =
    "raise the limit on locked memory (`ulimit -l unlimited`), or grant it CAP_SYS_RESOURCE";
const ELSEWHERE: &str = "the kernel, a security module or a sandbox forbids it to everybody: use a machine, or a virtual \
                         machine, whose kernel allows it";
const WITH_BTF: &str =
    "use a kernel with CONFIG_DEBUG_INFO_BTF=y, as distributions build it, and make /sys visible to this process";
const WITH_BPF: &str = "use a kernel with CONFIG_BPF_SYSCALL=y, as distributions build it";
const WITH_TRAMPOLINES: &str =
    "use a kernel with BPF trampolines for this architecture: on x86-64 Linux 5.10 or later, on arm64 6.4 or later";
const SWITCH_ON: &str = "switch the kernel's function tracer on: `sysctl kernel.ftrace_enabled=1`";
const REBOOT: &str = "see the kernel's log for what has happened, and reboot";
const WITH_TRACER: &str = "use a kernel with CONFIG_DYNAMIC_FTRACE=y, as distributions build it";
const NEWER: &str = "use Linux 5.10 or later";
const WITH_MODULE_BTF: &str = "for functions of modules, use Linux 5.11 or later with CONFIG_DEBUG_INFO_BTF_MODULES=y";

/// What was found.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    btf_size: Option<u64>,
    /// How many are loaded, and how many of them have type information.
    modules: Option<(usize, usize)>,
    /// Whether each is held, where that can be told.
    capabilities: [(Capability, Option<bool>); 4],
    user_namespace: Option<bool>,
    locked_memory_is_limited: bool,
    lockdown: Option<Lockdown>,
    function_tracer: FunctionTracer,
    trampolines: Trial,
    sessions: Trial,
    raw_tracepoints: Trial,
    typed_tracepoints: Trial,
    ring_buffer: Trial,
    atomics: Trial,
    /// Only tried where nothing else tells of a lockdown.
    kernel_reads: Option<Trial>,
}

/// In the order of the report.
const CAPABILITIES: [Capability; 4] =
    [Capability::Bpf, Capability::Perfmon, Capability::SysAdmin, Capability::SysResource];

impl Facts {
    pub(super) fn gather() -> Self {
        // Before the trials: libbpf lifts the limit, where it may.
        let locked_memory_is_limited = kernel::locked_memory_limit().is_some();
        let lockdown = kernel::lockdown();
        Self {
            btf_size: kernel::btf_size(),
            modules: kernel::modules_with_btf(),
            capabilities: CAPABILITIES.map(|capability| (capability, kernel::holds(capability))),
            user_namespace: kernel::user_namespace(),
            locked_memory_is_limited,
            lockdown,
            function_tracer: kernel::function_tracer(),
            trampolines: trials::trampolines(),
            sessions: trials::sessions(),
            raw_tracepoints: trials::raw_tracepoints(),
            typed_tracepoints: trials::typed_tracepoints(),
            ring_buffer: trials::ring_buffer(RING_BYTES),
            atomics: trials::atomics(),
            kernel_reads: lockdown.is_none().then(trials::kernel_reads),
        }
    }

    pub(super) fn judge(&self) -> Vec<Check> {
        let mut checks = vec![
            self.btf(),
            self.trial(Feature::Trampolines, &self.trampolines),
            self.trial(Feature::Sessions, &self.sessions),
            self.trial(Feature::RawTracepoints, &self.raw_tracepoints),
            self.trial(Feature::TypedTracepoints, &self.typed_tracepoints),
            self.trial(Feature::RingBuffer, &self.ring_buffer),
            self.trial(Feature::AtomicTable, &self.atomics),
            self.module_btf(),
        ];
        checks.extend(CAPABILITIES.map(|capability| self.capability(capability)));
        checks.push(self.initial_user_namespace());
        checks.push(self.lockdown());
        checks
    }

    fn btf(&self) -> Check {
        match self.btf_size {
            Some(bytes) => {
                yes(Feature::Btf, format!("/sys/kernel/btf/vmlinux, {:.1} MiB", bytes as f64 / f64::from(1 << 20)))
            }
            None => no(Feature::Btf, "there is no /sys/kernel/btf/vmlinux", Some(WITH_BTF)),
        }
    }

    fn module_btf(&self) -> Check {
        let feature = Feature::ModuleBtf;
        match self.modules {
            _ if self.btf_size.is_none() => {
                no(feature, "it builds upon the kernel's, which is missing", Some(WITH_BTF))
            }
            None => unknown(feature, "there is no /proc/modules: this kernel has no modules, or doesn't show them"),
            Some((0, _)) => unknown(feature, "no module is loaded"),
            Some((loaded, 0)) => no(feature, format!("none of {loaded} modules has it"), Some(WITH_MODULE_BTF)),
            Some((loaded, described)) => yes(feature, format!("{described} of {loaded} modules have it")),
        }
    }

    fn trial(&self, feature: Feature, trial: &Trial) -> Check {
        match trial {
            Ok(()) => yes(feature, worked(feature)),
            Err(refusal) => self.refused(feature, refusal),
        }
    }

    /// Why a trial failed.
    fn refused(&self, feature: Feature, refusal: &Refusal) -> Check {
        let Refusal { action, errno } = refusal;
        let said = match errno {
            0 => format!("{action} failed"),
            _ => Error::system(action, *errno).to_string(),
        };
        let needs_btf = matches!(feature, Feature::Trampolines | Feature::Sessions | Feature::TypedTracepoints);
        match *errno {
            EPERM | EACCES => self.forbidden(feature, &said),
            _ if needs_btf && self.btf_size.is_none() => {
                no(feature, "it takes the kernel's type information, which is missing", Some(WITH_BTF))
            }
            ENOTSUPP if feature == Feature::Trampolines => {
                no(feature, format!("{action} failed (errno {errno}): {NO_TRAMPOLINES}"), Some(WITH_TRAMPOLINES))
            }
            EINVAL | ENOTSUPP if feature == Feature::Sessions && self.lacks_trampolines() => {
                no(feature, NO_TRAMPOLINES, None)
            }
            EINVAL if feature == Feature::Sessions => no(
                feature,
                "this kernel has no fsession programs (Linux 7.0 has); fentry and fexit are used instead",
                None,
            ),
            EINVAL if feature == Feature::AtomicTable => no(
                feature,
                "this kernel has no compare-and-swap for programs (Linux 5.12 has); a hash map is used instead",
                None,
            ),
            ENOTSUPP | EOPNOTSUPP if feature == Feature::Sessions => {
                no(feature, format!("{said}; fentry and fexit are used instead"), None)
            }
            ENOTSUPP | EOPNOTSUPP => no(feature, said, Some(WITH_TRAMPOLINES)),
            EBUSY if needs_btf && self.function_tracer == FunctionTracer::Off => {
                no(feature, "the kernel's function tracer is switched off", Some(SWITCH_ON))
            }
            EBUSY | ENODEV if needs_btf && self.function_tracer == FunctionTracer::Broken => {
                no(feature, "the kernel's function tracer has shut itself down after a fault", Some(REBOOT))
            }
            EBUSY if needs_btf && self.function_tracer == FunctionTracer::Missing => {
                no(feature, "this kernel was built without the function tracer", Some(WITH_TRACER))
            }
            ENOSYS => no(feature, said, Some(WITH_BPF)),
            EINVAL => no(feature, said, Some(NEWER)),
            ENOENT | ESRCH => unknown(feature, format!("{said}; this kernel lacks what it was tried on")),
            _ => unknown(feature, said),
        }
    }

    fn lacks_trampolines(&self) -> bool {
        matches!(self.trampolines, Err(Refusal { errno: ENOTSUPP, .. }))
    }

    /// Why the kernel says that it isn't permitted.
    fn forbidden(&self, feature: Feature, said: &str) -> Check {
        if self.user_namespace == Some(true) {
            return no(
                feature,
                "this process is in a user namespace, where its capabilities don't count",
                Some(OUTSIDE),
            );
        }
        let needed: &[Capability] = match feature {
            Feature::RingBuffer | Feature::AtomicTable => &[Capability::Bpf],
            _ => &[Capability::Bpf, Capability::Perfmon],
        };
        let missing: Vec<_> = needed.iter().filter(|&&one| self.lacks(one)).map(Capability::to_string).collect();
        if !missing.is_empty() {
            return no(feature, format!("this process lacks {}", missing.join(" and ")), Some(AS_ROOT));
        }
        if self.locked_memory_is_limited && self.lacks(Capability::SysResource) {
            let cause = "it takes more locked memory than this process may have";
            return no(feature, cause, Some(MORE_LOCKED_MEMORY));
        }
        no(feature, format!("{said}, though this process has the capabilities"), Some(ELSEWHERE))
    }

    fn holds(&self, capability: Capability) -> Option<bool> {
        self.capabilities.iter().find(|(one, _)| *one == capability)?.1
    }

    /// For loading programs, `CAP_SYS_ADMIN` stands for the capabilities that were split off it.
    fn stands_in(&self, capability: Capability) -> bool {
        let split_off = matches!(capability, Capability::Bpf | Capability::Perfmon);
        split_off && self.holds(Capability::SysAdmin) == Some(true)
    }

    fn lacks(&self, capability: Capability) -> bool {
        self.holds(capability) == Some(false) && !self.stands_in(capability)
    }

    fn capability(&self, capability: Capability) -> Check {
        let feature = Feature::Capability(capability);
        let of_no_account = self.user_namespace == Some(true);
        match self.holds(capability) {
            None => unknown(feature, "/proc/self/status doesn't tell"),
            Some(true) if of_no_account => {
                no(feature, "held in a user namespace, where it doesn't count", Some(OUTSIDE))
            }
            Some(true) => yes(feature, "held"),
            Some(false) if !of_no_account && self.stands_in(capability) => yes(feature, "CAP_SYS_ADMIN stands for it"),
            Some(false) => match capability {
                Capability::Bpf | Capability::Perfmon => no(feature, "not held", Some(AS_ROOT)),
                Capability::SysAdmin => no(feature, "not held; only functions of modules take it", None),
                Capability::SysPtrace => {
                    no(feature, "not held; only namespaces of other users' processes take it", None)
                }
                Capability::SysResource if self.locked_memory_is_limited => {
                    no(feature, "not held, and locked memory is limited", Some(MORE_LOCKED_MEMORY))
                }
                Capability::SysResource => no(feature, "not held, and not needed here", None),
            },
        }
    }

    fn initial_user_namespace(&self) -> Check {
        let feature = Feature::InitialUserNamespace;
        match self.user_namespace {
            Some(false) => yes(feature, "/proc/self/uid_map maps every uid to itself"),
            Some(true) => {
                no(feature, "/proc/self/uid_map maps only some uids, as in a rootless container", Some(OUTSIDE))
            }
            None => unknown(feature, "there is no /proc/self/uid_map"),
        }
    }

    fn lockdown(&self) -> Check {
        let feature = Feature::Lockdown;
        match (self.lockdown, &self.kernel_reads) {
            (Some(Lockdown::None), _) => no(feature, "none", None),
            (Some(mode), _) => yes(feature, mode.to_string()),
            (None, Some(Err(Refusal { errno: EINVAL, .. }))) if self.raw_tracepoints.is_ok() => {
                yes(feature, "confidentiality, as a trial shows: programs may not read the kernel's memory")
            }
            (None, Some(Ok(()))) => unknown(
                feature,
                "there is no /sys/kernel/security/lockdown; but it isn't confidentiality, as a trial shows",
            ),
            (None, _) => unknown(feature, "there is no /sys/kernel/security/lockdown"),
        }
    }
}

fn worked(feature: Feature) -> &'static str {
    match feature {
        Feature::Trampolines => "fentry and fexit programs were loaded and attached",
        Feature::Sessions => "an fsession program was loaded and attached",
        Feature::RawTracepoints => "a program was attached to netif_receive_skb",
        Feature::TypedTracepoints => "a program with typed arguments was attached to netif_receive_skb",
        Feature::RingBuffer => "one of 4 MiB was created",
        Feature::AtomicTable => "a program with compare-and-swap was loaded",
        _ => "found",
    }
}

fn yes(feature: Feature, cause: impl Into<String>) -> Check {
    Check { feature, answer: Answer::Yes, cause: cause.into(), remedy: None }
}

fn no(feature: Feature, cause: impl Into<String>, remedy: Option<&str>) -> Check {
    Check { feature, answer: Answer::No, cause: cause.into(), remedy: remedy.map(str::to_owned) }
}

fn unknown(feature: Feature, cause: impl Into<String>) -> Check {
    Check { feature, answer: Answer::Unknown, cause: cause.into(), remedy: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::Support;

    const EMFILE: i32 = 24;

    /// A machine on which everything works.
    fn machine() -> Facts {
        Facts {
            btf_size: Some(5 << 20),
            modules: Some((12, 11)),
            capabilities: CAPABILITIES.map(|capability| (capability, Some(true))),
            user_namespace: Some(false),
            locked_memory_is_limited: false,
            lockdown: Some(Lockdown::None),
            function_tracer: FunctionTracer::On,
            trampolines: Ok(()),
            sessions: Ok(()),
            raw_tracepoints: Ok(()),
            typed_tracepoints: Ok(()),
            ring_buffer: Ok(()),
            atomics: Ok(()),
            kernel_reads: None,
        }
    }

    fn refusal(errno: i32) -> Trial {
        Err(Refusal { action: "loading a program".into(), errno })
    }

    /// Every trial ends so.
    fn all_trials(errno: i32, facts: Facts) -> Facts {
        Facts {
            trampolines: refusal(errno),
            sessions: refusal(errno),
            raw_tracepoints: refusal(errno),
            typed_tracepoints: refusal(errno),
            ring_buffer: refusal(errno),
            atomics: refusal(errno),
            ..facts
        }
    }

    fn support(facts: &Facts) -> Support {
        Support { kernel: "6.12".into(), architecture: "x86_64".into(), checks: facts.judge() }
    }

    #[track_caller]
    fn check(facts: &Facts, feature: Feature) -> (Answer, String, Option<String>) {
        let support = support(facts);
        let Check { answer, cause, remedy, .. } = support.get(feature).expect("each feature has a check");
        (*answer, cause.clone(), remedy.clone())
    }

    #[track_caller]
    fn assert_no(facts: &Facts, feature: Feature, cause: &str, remedy: Option<&str>) {
        assert_eq!(check(facts, feature), (Answer::No, cause.to_owned(), remedy.map(str::to_owned)));
    }

    /// Where all is well there is nothing to do.
    #[test]
    fn everything_works() {
        let support = support(&machine());
        assert!(support.can_trace_functions() && support.can_trace_packets());
        for check in support.checks() {
            let expected = if check.feature == Feature::Lockdown { Answer::No } else { Answer::Yes };
            assert_eq!((check.answer, &check.remedy), (expected, &None), "{}", check.feature);
        }
    }

    /// A machine that refuses tracing to root: packets remain.
    #[test]
    fn forbidden() {
        let facts = Facts { trampolines: refusal(EPERM), ..machine() };
        let cause =
            "loading a program failed: errno 1: Operation not permitted, though this process has the capabilities";
        assert_no(&facts, Feature::Trampolines, cause, Some(ELSEWHERE));
        assert!(!support(&facts).can_trace_functions() && support(&facts).can_trace_packets());
    }

    /// Without capabilities, those that a trial takes are named, and no others.
    #[test]
    fn unprivileged() {
        let mut facts = all_trials(EPERM, machine());
        facts.capabilities = CAPABILITIES.map(|capability| (capability, Some(false)));
        let both = "this process lacks CAP_BPF and CAP_PERFMON";
        assert_no(&facts, Feature::Trampolines, both, Some(AS_ROOT));
        assert_no(&facts, Feature::RingBuffer, "this process lacks CAP_BPF", Some(AS_ROOT));
        assert_no(&facts, Feature::Capability(Capability::Bpf), "not held", Some(AS_ROOT));
        for optional in [Capability::SysAdmin, Capability::SysResource] {
            assert_eq!(check(&facts, Feature::Capability(optional)).2, None);
        }
        // It stands for both, so it must be something else.
        facts.capabilities[2].1 = Some(true);
        assert_eq!(check(&facts, Feature::Capability(Capability::Perfmon)).0, Answer::Yes);
        assert_eq!(check(&facts, Feature::Trampolines).2.as_deref(), Some(ELSEWHERE));
        // Nor is anything known to be missing where /proc doesn't tell.
        facts.capabilities = CAPABILITIES.map(|capability| (capability, None));
        assert_eq!(check(&facts, Feature::Capability(Capability::Bpf)).0, Answer::Unknown);
        assert_eq!(check(&facts, Feature::Trampolines).2.as_deref(), Some(ELSEWHERE));
    }

    /// Root of a user namespace holds every capability, and none that counts.
    #[test]
    fn rootless() {
        let facts = Facts { user_namespace: Some(true), ..all_trials(EPERM, machine()) };
        for check in facts.judge() {
            let as_ever = matches!(check.feature, Feature::Btf | Feature::ModuleBtf | Feature::Lockdown);
            assert_eq!(check.remedy.as_deref(), (!as_ever).then_some(OUTSIDE), "{}", check.feature);
        }
    }

    /// What an old kernel lacks and what isn't needed is no reason to do anything.
    #[test]
    fn old_kernel() {
        let facts = Facts { sessions: refusal(EINVAL), atomics: refusal(EINVAL), modules: Some((4, 0)), ..machine() };
        assert!(support(&facts).can_trace_functions());
        for optional in [Feature::Sessions, Feature::AtomicTable] {
            let (answer, cause, remedy) = check(&facts, optional);
            assert!(answer == Answer::No && cause.contains("instead") && remedy.is_none(), "{optional}: {cause}");
        }
        assert_no(&facts, Feature::ModuleBtf, "none of 4 modules has it", Some(WITH_MODULE_BTF));
    }

    /// arm64 before 6.4: the program loads, and can't be attached.
    #[test]
    fn no_trampolines() {
        let refusal = Refusal { action: "attaching a program".into(), errno: ENOTSUPP };
        let facts = Facts { trampolines: Err(refusal), sessions: self::refusal(EINVAL), ..machine() };
        let cause = "attaching a program failed (errno 524): this kernel has no BPF trampolines on this architecture";
        assert_no(&facts, Feature::Trampolines, cause, Some(WITH_TRAMPOLINES));
        assert_no(&facts, Feature::Sessions, NO_TRAMPOLINES, None);
        assert!(!support(&facts).can_trace_functions() && support(&facts).can_trace_packets());
    }

    /// Programs are attached to functions by the function tracer, which can be switched off or left out.
    #[test]
    fn no_function_tracer() {
        for (function_tracer, remedy) in [
            (FunctionTracer::Off, Some(SWITCH_ON)),
            (FunctionTracer::Missing, Some(WITH_TRACER)),
            (FunctionTracer::On, None),
        ] {
            let facts = Facts { function_tracer, trampolines: refusal(EBUSY), ..machine() };
            let check = facts.judge().into_iter().find(|check| check.feature == Feature::Trampolines).unwrap();
            assert_eq!(check.remedy.as_deref(), remedy, "{check:?}");
            assert_eq!(check.answer, if remedy.is_some() { Answer::No } else { Answer::Unknown }, "{check:?}");
        }
    }

    /// Without type information libbpf doesn't even ask the kernel.
    #[test]
    fn no_btf() {
        let facts = Facts { btf_size: None, trampolines: refusal(ESRCH), ..machine() };
        assert_no(&facts, Feature::Btf, "there is no /sys/kernel/btf/vmlinux", Some(WITH_BTF));
        assert_eq!(check(&facts, Feature::ModuleBtf).0, Answer::No);
        assert_eq!(check(&facts, Feature::Trampolines).2.as_deref(), Some(WITH_BTF));
        assert!(!support(&facts).can_trace_packets());
    }

    /// Before 5.11 the limit on locked memory bounds maps.
    #[test]
    fn locked_memory() {
        let mut facts = Facts { locked_memory_is_limited: true, ring_buffer: refusal(EPERM), ..machine() };
        facts.capabilities[3].1 = Some(false);
        let cause = "it takes more locked memory than this process may have";
        assert_no(&facts, Feature::RingBuffer, cause, Some(MORE_LOCKED_MEMORY));
        assert_eq!(check(&facts, Feature::Capability(Capability::SysResource)).2.as_deref(), Some(MORE_LOCKED_MEMORY));
        assert!(!support(&facts).can_trace_functions() && !support(&facts).can_trace_packets());
    }

    /// The system's troubles are no answer.
    #[test]
    fn unknown_answers() {
        for errno in [0, ENOENT, EMFILE] {
            let facts = Facts { trampolines: refusal(errno), ..machine() };
            assert_eq!(check(&facts, Feature::Trampolines).0, Answer::Unknown, "{errno}");
            assert!(!support(&facts).can_trace_functions());
        }
        for modules in [None, Some((0, 0))] {
            assert_eq!(check(&Facts { modules, ..machine() }, Feature::ModuleBtf).0, Answer::Unknown);
        }
    }

    /// The kernel says how far it is locked down; else what its programs may do tells half of it.
    #[test]
    fn lockdown() {
        let answer = |lockdown, kernel_reads| {
            let (answer, cause, _) = check(&Facts { lockdown, kernel_reads, ..machine() }, Feature::Lockdown);
            (answer, cause)
        };
        assert_eq!(answer(Some(Lockdown::Integrity), None), (Answer::Yes, "integrity".into()));
        assert_eq!(answer(None, Some(refusal(EINVAL))).0, Answer::Yes);
        assert_eq!(answer(None, Some(Ok(()))).0, Answer::Unknown);
        assert_eq!(answer(None, Some(refusal(EPERM))).0, Answer::Unknown);
    }

    /// Whatever the kernel answers, each check has its cause, in one line, and who can't trace is told what to do.
    #[test]
    fn any_errno() {
        for errno in (0..134).chain([ENOTSUPP, -1, i32::MAX]) {
            for facts in [machine(), Facts { btf_size: None, user_namespace: None, ..machine() }] {
                for check in all_trials(errno, facts).judge() {
                    assert!(!check.cause.is_empty() && !check.cause.contains('\n'), "{errno}: {check:?}");
                    let needed = matches!(check.feature, Feature::Trampolines | Feature::RingBuffer);
                    assert!(!needed || check.answer != Answer::No || check.remedy.is_some(), "{errno}: {check:?}");
                }
            }
        }
    }
}
