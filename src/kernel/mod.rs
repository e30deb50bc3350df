//! What this kernel has: which functions and tracepoints, with which signatures, and what this process may do with them.
//!
//! Everything here reads files of `/sys` and `/proc`; nothing is loaded or attached.

mod btf;
mod btf_writer;
#[cfg(test)]
mod canned;
mod core_types;
mod explain;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod host;
mod index;
mod installed;
mod lookup;
mod preempt;
mod refused;
mod signature;
mod symbolizer;
mod symbols;

pub(crate) use explain::near;
pub(crate) use host::{
    FunctionTracer, btf_size, function_tracer, holds, lacks, lockdown, locked_memory_limit, modules_with_btf,
    user_namespace,
};
pub(crate) use installed::wait_for_any;
pub(crate) use lookup::{Function, Kernel, Tracepoint};
pub(crate) use preempt::PreemptCount;
pub(crate) use signature::{Param, Return, Signature};
pub use symbolizer::Symbol;
pub(crate) use symbolizer::{PROGRAMS, Symbolizer};
pub(crate) use symbols::why_not_attached;

use crate::error::{Capability, Error, ErrorKind, NotTraceable};

/// Where the kernel shows its own type information, and its modules'.
const BTF_DIR: &str = "/sys/kernel/btf";
/// What the two capabilities are for.
const TRACING: &str = "tracing";
/// What the kernel itself is called where modules are.
const VMLINUX: &str = "vmlinux";

/// What it means that the kernel refuses a process with every capability that it asks for; `None`: that it does.
pub(crate) fn why_refused_with_all_capabilities() -> Option<Error> {
    let missing = vec![Capability::Bpf, Capability::Perfmon];
    let error = || ErrorKind::NoPrivilege { action: TRACING.to_owned(), missing, user_namespace: true }.into();
    host::in_user_namespace().then(error)
}

/// Why the kernel can't attach programs to any function, if its function tracer is to blame.
pub(crate) fn why_no_tracer() -> Option<NotTraceable> {
    match function_tracer() {
        FunctionTracer::Off => Some(NotTraceable::TracerOff),
        FunctionTracer::Broken => Some(NotTraceable::TracerBroken),
        FunctionTracer::Missing => Some(NotTraceable::NoTracer),
        FunctionTracer::On | FunctionTracer::Unknown => None,
    }
}

/// Fails unless this process may load tracing programs, as far as its capabilities tell.
///
/// `CAP_SYS_ADMIN` stands for both; the kernel has asked for `CAP_BPF` and `CAP_PERFMON` since 5.8.
pub(crate) fn check_privileges() -> Result<(), Error> {
    let missing: Vec<_> =
        [Capability::Bpf, Capability::Perfmon].into_iter().filter(|&capability| lacks(capability)).collect();
    if missing.is_empty() || !lacks(Capability::SysAdmin) {
        return Ok(());
    }
    Err(Error::no_privilege(TRACING, missing))
}
