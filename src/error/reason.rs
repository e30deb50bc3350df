//! Why a function can't be traced.

use super::errno_text;

/// Why a function can't be traced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotTraceable {
    /// The compiler left only specialised copies of it, which are no functions of that name any more.
    #[error("the compiler left only specialised copies of it ({})", .symbols.join(", "))]
    #[non_exhaustive]
    OptimisedVariant {
        /// Their names, such as `name.isra.0`.
        symbols: Vec<String>,
    },
    /// It has no code of its own: inlined into its callers everywhere, or of a module, which needed it only to start.
    #[error(
        "it has no code of its own in this kernel: inlined into its callers, or discarded once its module was initialised"
    )]
    Inlined,
    /// The kernel excludes it from tracing.
    #[error("the kernel excludes it from tracing (it is not in available_filter_functions)")]
    Excluded,
    /// The kernel has it, but says nothing of its arguments.
    #[error("the kernel's type information leaves it out")]
    Untyped,
    /// Its arguments take more registers than this kernel's trampolines save.
    #[error(
        "its arguments take {words} registers, more than this kernel can save \
         (on x86-64 6 before Linux 6.6, on arm64 8 at first; later 12)"
    )]
    #[non_exhaustive]
    TooManyArguments {
        /// The registers that they take.
        words: u32,
    },
    /// It takes a variable number of arguments.
    #[error("it takes a variable number of arguments")]
    Variadic,
    /// It returns a struct, a union or a float, which fexit can't hand over.
    #[error("it returns a value that fits no register")]
    ReturnsAggregate,
    /// It never returns, so it has no latency, and each call would leave a started span behind.
    #[error("it never returns")]
    NeverReturns,
    /// It is part of what the probe's own programs use: spin locks, clocks, RCU, BPF maps.
    #[error("it is part of what the probe's own programs use")]
    ProbePath,
    /// Several functions of this kernel have this name.
    #[error("{} functions have this name ({}): say which, as MODULE:FUNCTION", .modules.len(), .modules.join(", "))]
    #[non_exhaustive]
    Ambiguous {
        /// The modules they are in, `vmlinux` for the kernel itself.
        modules: Vec<String>,
    },
    /// Several functions have this name, and this kernel would attach to any of them.
    #[error("it is one of {copies} functions of this name, which this kernel can't tell apart")]
    #[non_exhaustive]
    Indistinct {
        /// How many there are.
        copies: usize,
    },
    /// It is in a module whose type information the kernel doesn't offer: before 5.11 it has none of any module.
    #[error("it is in module {module}, of which this kernel has no type information (before Linux 5.11: of no module)")]
    #[non_exhaustive]
    ModuleWithoutBtf {
        /// The module.
        module: String,
    },
    /// It is in a module that isn't loaded.
    #[error("its module {module} isn't loaded (`modprobe {module}`)")]
    #[non_exhaustive]
    ModuleNotLoaded {
        /// The module.
        module: String,
    },
    /// It is said to be in a module that is part of the kernel itself.
    #[error("{module} is no module but part of this kernel: name the function without it")]
    #[non_exhaustive]
    ModuleBuiltIn {
        /// The module.
        module: String,
    },
    /// The kernel's function tracer, which attaches programs to functions, is switched off.
    #[error("the kernel's function tracer is switched off: `sysctl kernel.ftrace_enabled=1` switches it on")]
    TracerOff,
    /// The kernel's function tracer, which attaches programs to functions, doesn't work any more.
    #[error(
        "the kernel's function tracer has shut itself down, as it does after a fault: see the kernel's log, and reboot"
    )]
    TracerBroken,
    /// The kernel was built without the function tracer, which attaches programs to functions.
    #[error("this kernel was built without the function tracer (CONFIG_DYNAMIC_FTRACE=y), which it takes")]
    NoTracer,
    /// As many programs are attached to it as the kernel allows.
    #[error("as many programs are attached to it as the kernel allows (38 on most kernels, two for each span)")]
    TooManyProbes,
    /// The kernel refused to attach to it, or libbpf to load the program for it. What the kernel's verifier refuses is
    /// [`ErrorKind::Rejected`](crate::ErrorKind::Rejected).
    #[error("the kernel refused it ({}){}", errno_text(*errno), log_text(log))]
    #[non_exhaustive]
    Refused {
        /// The kernel's answer.
        errno: i32,
        /// The last lines that libbpf had to say.
        log: Vec<String>,
    },
}

fn log_text(log: &[String]) -> String {
    if log.is_empty() { String::new() } else { format!(": {}", log.join(" | ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reasons that say what to do about it, or list something.
    #[test]
    fn texts() {
        let module = || "nf_tables".to_owned();
        let cases = [
            (
                NotTraceable::OptimisedVariant { symbols: vec!["f.isra.0".into(), "f.constprop.0".into()] },
                "the compiler left only specialised copies of it (f.isra.0, f.constprop.0)",
            ),
            (
                NotTraceable::Inlined,
                "it has no code of its own in this kernel: inlined into its callers, \
                 or discarded once its module was initialised",
            ),
            (
                NotTraceable::Ambiguous { modules: vec!["nf_nat".into(), "nft_ct".into()] },
                "2 functions have this name (nf_nat, nft_ct): say which, as MODULE:FUNCTION",
            ),
            (
                NotTraceable::ModuleNotLoaded { module: module() },
                "its module nf_tables isn't loaded (`modprobe nf_tables`)",
            ),
            (
                NotTraceable::ModuleBuiltIn { module: module() },
                "nf_tables is no module but part of this kernel: name the function without it",
            ),
            (
                NotTraceable::Refused { errno: 22, log: vec!["a".into(), "b".into()] },
                "the kernel refused it (errno 22: Invalid argument): a | b",
            ),
        ];
        for (reason, text) in cases {
            assert_eq!(reason.to_string(), text);
        }
    }
}
