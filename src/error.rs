//! What can go wrong, with what, and what to do about it.

mod reason;

use std::fmt;
use std::io;

pub use reason::NotTraceable;

use crate::group::GroupBy;
use crate::stage::Stage;

/// Every failure of this crate.
///
/// [`kind`](Error::kind) says what went wrong in a form to match on; the `Display` text says it to a person: what
/// was wrong, with what, and what to do. The underlying operating-system error, where there is one, is the
/// [`source`](std::error::Error::source).
///
/// ```
/// use dwell::{ErrorKind, LatencyProbe};
///
/// let error = LatencyProbe::builder().attach().unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::Config { .. }));
/// assert_eq!(error.to_string(), "nothing to measure: name a function with `function()`, or a span with `span()`");
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    source: Option<io::Error>,
}

/// What went wrong; see [`Error::kind`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting of the builder, of a span or of a hook is out of its range or contradicts another.
    #[error("{reason}")]
    #[non_exhaustive]
    Config {
        /// The method, or what was to be read from a text.
        setting: &'static str,
        /// What is wrong with it.
        reason: String,
    },

    /// The text of a filter can't be read.
    #[error("the filter can't be read at character {position}: {reason}")]
    #[non_exhaustive]
    FilterSyntax {
        /// Where it went wrong, in characters from 1; one more than there are at the end of the text.
        position: usize,
        /// The word that it went wrong with; empty at the end of the text.
        word: String,
        /// What is wrong with it, and what may have been meant.
        reason: String,
    },

    /// A filter asks more of a packet than the kernel's table has room for.
    #[error(
        "the filter takes {tests} tests of a packet, and there is room for {most}: use prefixes and ranges in place of \
         single addresses and ports"
    )]
    #[non_exhaustive]
    FilterTooLong {
        /// How many it takes: one for each thing that it asks, two for an address or port at either end.
        tests: usize,
        /// How many there may be.
        most: usize,
    },

    /// libpcap doesn't understand an expression. It doesn't say where it went wrong.
    #[error("libpcap doesn't understand `{}`: {message}", expression.escape_debug())]
    #[non_exhaustive]
    PcapSyntax {
        /// What was to be compiled.
        expression: String,
        /// What libpcap has to say.
        message: String,
    },

    /// A pcap expression takes more instructions than the kernel's table has room for.
    #[error("the pcap expression takes {instructions} instructions, and there is room for {most}: make it simpler")]
    #[non_exhaustive]
    PcapTooLong {
        /// How many it takes, as `tcpdump -d` shows them.
        instructions: usize,
        /// How many there may be.
        most: usize,
    },

    /// libpcap compiles a pcap expression to what the kernel's programs can't run.
    #[error("the pcap expression `{}` can't be a filter: {reason}", expression.escape_debug())]
    #[non_exhaustive]
    PcapUnsupported {
        /// What was compiled.
        expression: String,
        /// What is in the way.
        reason: &'static str,
    },

    /// The filter of a span, with that of its probe, has two pcap expressions.
    #[error(
        "a span can be filtered by one pcap expression, not by `{}` and `{}`: put them into one",
        first.escape_debug(),
        second.escape_debug()
    )]
    #[non_exhaustive]
    PcapTwice {
        /// The one.
        first: String,
        /// The other.
        second: String,
    },

    /// What a filter names isn't on this host, as far as this process sees.
    #[error("there is no {what} `{}` here{}{}", name.escape_debug(), reason_text(reason), near_text(near, ""))]
    #[non_exhaustive]
    NotFound {
        /// What it should have been, such as `interface`.
        what: &'static str,
        /// The name that was asked for.
        name: String,
        /// What there is instead, where it is known; or empty.
        reason: String,
        /// Up to three names that look like it, the nearest first.
        near: Vec<String>,
    },

    /// A filter asks for what only the host's own namespaces tell, and this process is in others.
    #[error("`{filter}` can't be filtered by here: {reason}")]
    #[non_exhaustive]
    HostNeeded {
        /// That part of the filter.
        filter: String,
        /// Which namespace it is, and what to do.
        reason: &'static str,
    },

    /// This kernel, with the modules that are loaded now, has no function of that name.
    #[error("this kernel has no function `{function}`{}", near_text(near, OTHER_MODULE))]
    #[non_exhaustive]
    UnknownFunction {
        /// The name that was asked for.
        function: String,
        /// Up to three names that look like it, the nearest first.
        near: Vec<String>,
    },

    /// This kernel, with the modules that are loaded now, has no raw tracepoint of that name.
    #[error("this kernel has no raw tracepoint `{tracepoint}`{}", near_text(near, OTHER_MODULE))]
    #[non_exhaustive]
    UnknownTracepoint {
        /// The name that was asked for.
        tracepoint: String,
        /// Up to three names that look like it, the nearest first.
        near: Vec<String>,
    },

    /// This kernel has no module of that name, neither loaded nor to be loaded.
    #[error("`{function}`: this kernel has no module `{module}`{}", near_text(near, ""))]
    #[non_exhaustive]
    UnknownModule {
        /// The name that was asked for, as `MODULE:FUNCTION`.
        function: String,
        /// The module.
        module: String,
        /// Up to three names that look like the module's, the nearest first.
        near: Vec<String>,
    },

    /// The hook has no argument that could be the key of its span.
    #[error("`{hook}` has no argument that is {key}; {}", arguments_text(arguments))]
    #[non_exhaustive]
    NoKey {
        /// The function or tracepoint.
        hook: String,
        /// What was looked for, such as `a packet (struct sk_buff *)`.
        key: &'static str,
        /// What it has, as C declares it.
        arguments: Vec<String>,
    },

    /// The kernel refuses programs on tracepoints that could follow their arguments, and this key takes more than an
    /// address.
    #[error(
        "`{hook}` can't be keyed by {key} here: this kernel refuses typed tracepoints, so only the addresses of arguments \
         are known; use the key skb or thread, or sock where an argument is a struct sock"
    )]
    #[non_exhaustive]
    NoTypes {
        /// The tracepoint.
        hook: String,
        /// The key that was asked for.
        key: String,
    },

    /// The kernel is locked down so far that programs can't read packets' headers.
    #[error(
        "`{hook}` can't be keyed by flow here: this kernel keeps programs from reading packets' headers, as it does when it \
         is locked down (confidentiality); use a hook that has a socket, or another key"
    )]
    #[non_exhaustive]
    NoHeaders {
        /// The function or tracepoint.
        hook: String,
    },

    /// Here the kernel doesn't let programs read what the span is to be grouped by.
    #[error("`{hook}` can't be grouped by {by} here: {reason}; by cpu it can")]
    #[non_exhaustive]
    NotGrouped {
        /// The function or tracepoint.
        hook: String,
        /// What was asked for.
        by: GroupBy,
        /// What the kernel refuses.
        reason: &'static str,
    },

    /// A span can't be filtered by what was asked for: where it starts, that isn't to be had.
    #[error("`{hook}` can't be filtered by {by}: {reason}")]
    #[non_exhaustive]
    NotFiltered {
        /// The function or tracepoint.
        hook: String,
        /// What was asked for.
        by: &'static str,
        /// What is lacking.
        reason: &'static str,
    },

    /// The function exists but fentry/fexit programs can't be attached to it.
    #[error("`{function}` can't be traced: {reason}")]
    #[non_exhaustive]
    NotTraceable {
        /// The name that was asked for.
        function: String,
        /// Why not.
        reason: NotTraceable,
    },

    /// This kernel, with the modules that are loaded now, has nothing that the stage could be measured by.
    #[error("the stage `{stage}` can't be had here: {}", reasons.join("; "))]
    #[non_exhaustive]
    StageUnavailable {
        /// The stage that was asked for.
        stage: Stage,
        /// Why not: for each function that was looked for, with what would have to be done about it.
        reasons: Vec<String>,
    },

    /// The process lacks capabilities that something needs.
    #[error("{action} needs {}, which this process lacks{}", list(missing), privilege_remedy(*user_namespace))]
    #[non_exhaustive]
    NoPrivilege {
        /// What needs them: `tracing`, or one thing that needs more than that.
        action: String,
        /// The missing capabilities.
        missing: Vec<Capability>,
        /// The process has them, but only within a user namespace, as in a rootless container: there they don't count.
        user_namespace: bool,
    },

    /// Before Linux 5.11 maps and programs count as locked memory, and the limit on that leaves no room for these.
    #[error(
        "maps and programs count as locked memory before Linux 5.11, and here RLIMIT_MEMLOCK is {} bytes for all that this \
         user has: raise it (`ulimit -l unlimited`, in a service `LimitMEMLOCK=infinity`), or grant CAP_SYS_RESOURCE",
        limit
    )]
    #[non_exhaustive]
    LockedMemory {
        /// The limit, in bytes.
        limit: u64,
    },

    /// The kernel doesn't describe its types, which say what functions and tracepoints take.
    #[error(
        "this kernel offers no type information at {path}: it needs CONFIG_DEBUG_INFO_BTF=y, \
         and /sys must be visible to this process"
    )]
    #[non_exhaustive]
    NoBtf {
        /// Where it was looked for.
        path: String,
    },

    /// What should describe the kernel's types doesn't.
    #[error("the type information at {path} can't be read: {reason}")]
    #[non_exhaustive]
    BadBtf {
        /// Where it was read.
        path: String,
        /// What is wrong with it.
        reason: String,
    },

    /// The kernel refuses fentry/fexit programs, whatever the function, though the process has the capabilities.
    #[error("this kernel refuses fentry/fexit programs ({}); {}", errno_text(*errno), lockdown_text(*lockdown))]
    #[non_exhaustive]
    TracingRefused {
        /// The kernel's answer, such as 1 (`EPERM`) or 524 (`ENOTSUPP`: no trampolines on this architecture).
        errno: i32,
        /// Whether the kernel is locked down; `None` where it doesn't say.
        lockdown: Option<Lockdown>,
    },

    /// The kernel or the system refused something else.
    #[error("{action} failed: {}", errno_text(*errno))]
    #[non_exhaustive]
    System {
        /// What was tried.
        action: String,
        /// The kernel's answer.
        errno: i32,
    },
}

/// A Linux capability that tracing may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// `CAP_BPF`: to create maps and load programs.
    Bpf,
    /// `CAP_PERFMON`: to load tracing programs.
    Perfmon,
    /// `CAP_SYS_ADMIN`: to trace functions of modules, and to have the kernel count what programs cost.
    SysAdmin,
    /// `CAP_SYS_PTRACE`: to look at the namespaces of other users' processes.
    SysPtrace,
    /// `CAP_SYS_RESOURCE`: to lift the limit on locked memory, where the kernel counts maps against it (before 5.11).
    SysResource,
}

impl Capability {
    /// Its bit in a capability set, from `include/uapi/linux/capability.h`.
    pub(crate) fn bit(self) -> u32 {
        match self {
            Self::SysPtrace => 19,
            Self::SysAdmin => 21,
            Self::SysResource => 24,
            Self::Perfmon => 38,
            Self::Bpf => 39,
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bpf => "CAP_BPF",
            Self::Perfmon => "CAP_PERFMON",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::SysPtrace => "CAP_SYS_PTRACE",
            Self::SysResource => "CAP_SYS_RESOURCE",
        })
    }
}

/// How far the kernel is locked down (`/sys/kernel/security/lockdown`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lockdown {
    /// Not at all.
    None,
    /// User space can't change the running kernel.
    Integrity,
    /// User space can't read the kernel's secrets either.
    Confidentiality,
}

impl fmt::Display for Lockdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Integrity => "integrity",
            Self::Confidentiality => "confidentiality",
        })
    }
}

impl Error {
    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The function or tracepoint that it went wrong with, where it was one.
    pub fn hook(&self) -> Option<&str> {
        match self.kind() {
            ErrorKind::UnknownFunction { function, .. }
            | ErrorKind::UnknownModule { function, .. }
            | ErrorKind::NotTraceable { function, .. } => Some(function),
            ErrorKind::UnknownTracepoint { tracepoint, .. } => Some(tracepoint),
            ErrorKind::NoKey { hook, .. }
            | ErrorKind::NoTypes { hook, .. }
            | ErrorKind::NoHeaders { hook }
            | ErrorKind::NotGrouped { hook, .. }
            | ErrorKind::NotFiltered { hook, .. } => Some(hook),
            _ => None,
        }
    }

    pub(crate) fn config(setting: &'static str, reason: impl Into<String>) -> Self {
        ErrorKind::Config { setting, reason: reason.into() }.into()
    }

    pub(crate) fn not_traceable(function: &str, reason: NotTraceable) -> Self {
        ErrorKind::NotTraceable { function: function.to_owned(), reason }.into()
    }

    pub(crate) fn system(action: impl Into<String>, errno: i32) -> Self {
        ErrorKind::System { action: action.into(), errno }.into()
    }

    /// `action` is what needs these.
    pub(crate) fn no_privilege(action: impl Into<String>, missing: Vec<Capability>) -> Self {
        ErrorKind::NoPrivilege { action: action.into(), missing, user_namespace: false }.into()
    }

    /// Adds the operating system's error as the source.
    pub(crate) fn with_errno(mut self, errno: i32) -> Self {
        self.0.source = Some(io::Error::from_raw_os_error(errno));
        self
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self(Box::new(Inner { kind, source: None }))
    }
}

/// The same text: it is what a `main` that returns the error shows, and a failed `unwrap`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.kind.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| source as _)
    }
}

/// The kernel's own ENOTSUPP, which no C library has a text for.
pub(crate) const ENOTSUPP: i32 = 524;

fn errno_text(errno: i32) -> String {
    match errno {
        ENOTSUPP => "errno 524: not supported on this architecture".to_owned(),
        // io::Error's text: "Operation not permitted (os error 1)".
        _ => {
            let text = io::Error::from_raw_os_error(errno).to_string();
            let text = text.split(" (os error").next().unwrap_or_default();
            format!("errno {errno}: {text}")
        }
    }
}

fn privilege_remedy(user_namespace: bool) -> &'static str {
    if user_namespace {
        " outside its user namespace: run it on the host, or in a container that isn't rootless"
    } else {
        ": run it as root, or grant it with `setcap`"
    }
}

fn lockdown_text(lockdown: Option<Lockdown>) -> String {
    match lockdown {
        Some(Lockdown::None) => "it is not locked down".to_owned(),
        Some(mode) => format!("it is locked down ({mode})"),
        None => "it doesn't say whether it is locked down".to_owned(),
    }
}

/// What may help where no name comes near.
const OTHER_MODULE: &str = "; is its module loaded?";

fn near_text(near: &[String], otherwise: &str) -> String {
    if near.is_empty() {
        return otherwise.to_owned();
    }
    let near: Vec<_> = near.iter().map(|name| format!("`{name}`")).collect();
    format!("; did you mean {}?", near.join(" or "))
}

fn reason_text(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(": {reason}") }
}

fn arguments_text(arguments: &[String]) -> String {
    if arguments.is_empty() { "it has none".to_owned() } else { format!("it has: {}", arguments.join(", ")) }
}

fn list(capabilities: &[Capability]) -> String {
    let names: Vec<_> = capabilities.iter().map(Capability::to_string).collect();
    names.join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error is one word, so that results stay small.
    #[test]
    fn is_one_word() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
    }

    /// Each kind's text, as a user reads it: one line that says what, with what, and what to do.
    #[test]
    fn texts() {
        let cases: [(ErrorKind, &str); 26] = [
            (
                ErrorKind::FilterSyntax { position: 5, word: "x".into(), reason: "`x` is no port".into() },
                "the filter can't be read at character 5: `x` is no port",
            ),
            (
                ErrorKind::FilterTooLong { tests: 40, most: 32 },
                "the filter takes 40 tests of a packet, and there is room for 32: \
                 use prefixes and ranges in place of single addresses and ports",
            ),
            (
                ErrorKind::PcapSyntax { expression: "port\n".into(), message: "syntax error".into() },
                "libpcap doesn't understand `port\\n`: syntax error",
            ),
            (
                ErrorKind::PcapTooLong { instructions: 200, most: 128 },
                "the pcap expression takes 200 instructions, and there is room for 128: make it simpler",
            ),
            (
                ErrorKind::PcapUnsupported { expression: "ip protochain 6".into(), reason: "it goes back" },
                "the pcap expression `ip protochain 6` can't be a filter: it goes back",
            ),
            (
                ErrorKind::PcapTwice { first: "ip".into(), second: "ip6".into() },
                "a span can be filtered by one pcap expression, not by `ip` and `ip6`: put them into one",
            ),
            (
                ErrorKind::NotFound {
                    what: "interface",
                    name: "eht0".into(),
                    reason: String::new(),
                    near: vec!["eth0".into()],
                },
                "there is no interface `eht0` here; did you mean `eth0`?",
            ),
            (
                ErrorKind::NotFound {
                    what: "network namespace",
                    name: "/a".into(),
                    reason: "it is a plain file".into(),
                    near: vec![],
                },
                "there is no network namespace `/a` here: it is a plain file",
            ),
            (
                ErrorKind::HostNeeded { filter: "pid 1".into(), reason: "only the host knows" },
                "`pid 1` can't be filtered by here: only the host knows",
            ),
            (
                ErrorKind::UnknownFunction { function: "ip_rvc".into(), near: vec!["ip_rcv".into()] },
                "this kernel has no function `ip_rvc`; did you mean `ip_rcv`?",
            ),
            (
                ErrorKind::UnknownFunction { function: "x".into(), near: vec![] },
                "this kernel has no function `x`; is its module loaded?",
            ),
            (
                ErrorKind::UnknownTracepoint { tracepoint: "skb:kfree_skb".into(), near: vec!["kfree_skb".into()] },
                "this kernel has no raw tracepoint `skb:kfree_skb`; did you mean `kfree_skb`?",
            ),
            (
                ErrorKind::UnknownModule {
                    function: "nf_table:f".into(),
                    module: "nf_table".into(),
                    near: vec!["nf_tables".into()],
                },
                "`nf_table:f`: this kernel has no module `nf_table`; did you mean `nf_tables`?",
            ),
            (
                ErrorKind::UnknownModule { function: "m:f".into(), module: "m".into(), near: vec![] },
                "`m:f`: this kernel has no module `m`",
            ),
            (
                ErrorKind::NoKey {
                    hook: "ip_list_rcv".into(),
                    key: "a packet (struct sk_buff *)",
                    arguments: vec!["struct list_head *head".into(), "struct net_device *orig_dev".into()],
                },
                "`ip_list_rcv` has no argument that is a packet (struct sk_buff *); \
                 it has: struct list_head *head, struct net_device *orig_dev",
            ),
            (
                ErrorKind::NoKey { hook: "f".into(), key: "a socket (struct sock *)", arguments: vec![] },
                "`f` has no argument that is a socket (struct sock *); it has none",
            ),
            (
                ErrorKind::StageUnavailable {
                    stage: Stage::Conntrack,
                    reasons: vec!["no `a`".into(), "no `b`".into()],
                },
                "the stage `conntrack` can't be had here: no `a`; no `b`",
            ),
            (
                ErrorKind::NoPrivilege {
                    action: "tracing".into(),
                    missing: vec![Capability::Bpf, Capability::Perfmon],
                    user_namespace: false,
                },
                "tracing needs CAP_BPF and CAP_PERFMON, which this process lacks: run it as root, or grant it with `setcap`",
            ),
            (
                ErrorKind::NoPrivilege {
                    action: "tracing".into(),
                    missing: vec![Capability::Bpf],
                    user_namespace: true,
                },
                "tracing needs CAP_BPF, which this process lacks outside its user namespace: \
                 run it on the host, or in a container that isn't rootless",
            ),
            (
                ErrorKind::LockedMemory { limit: 65_536 },
                "maps and programs count as locked memory before Linux 5.11, and here RLIMIT_MEMLOCK is 65536 bytes for all \
                 that this user has: raise it (`ulimit -l unlimited`, in a service `LimitMEMLOCK=infinity`), or grant \
                 CAP_SYS_RESOURCE",
            ),
            (
                ErrorKind::BadBtf { path: "/sys/kernel/btf/vmlinux".into(), reason: "it is cut off".into() },
                "the type information at /sys/kernel/btf/vmlinux can't be read: it is cut off",
            ),
            (
                ErrorKind::TracingRefused { errno: 1, lockdown: Some(Lockdown::Confidentiality) },
                "this kernel refuses fentry/fexit programs (errno 1: Operation not permitted); \
                 it is locked down (confidentiality)",
            ),
            (
                ErrorKind::TracingRefused { errno: 524, lockdown: None },
                "this kernel refuses fentry/fexit programs (errno 524: not supported on this architecture); \
                 it doesn't say whether it is locked down",
            ),
            (
                ErrorKind::NotTraceable { function: "do_exit".into(), reason: NotTraceable::NeverReturns },
                "`do_exit` can't be traced: it never returns",
            ),
            (
                ErrorKind::System { action: "creating the ring buffer".into(), errno: 12 },
                "creating the ring buffer failed: errno 12: Cannot allocate memory",
            ),
            (
                ErrorKind::NoBtf { path: "/sys/kernel/btf/vmlinux".into() },
                "this kernel offers no type information at /sys/kernel/btf/vmlinux: it needs \
                 CONFIG_DEBUG_INFO_BTF=y, and /sys must be visible to this process",
            ),
        ];
        for (kind, text) in cases {
            assert_eq!(Error::from(kind).to_string(), text);
        }
    }

    /// The operating system's error is the source.
    #[test]
    fn has_a_source() {
        let error = Error::system("reading", 2).with_errno(2);
        let source = std::error::Error::source(&error).expect("there is one");
        assert!(source.to_string().contains("No such file"));
    }
}
