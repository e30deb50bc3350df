//! What libbpf-cargo made of the programs.

#[cfg(not(dwell_docs))]
#[allow(warnings, unsafe_code, clippy::all, clippy::restriction, reason = "generated code")]
mod generated {
    pub(in super::super) mod call {
        include!(concat!(env!("OUT_DIR"), "/call.skel.rs"));
    }
    pub(in super::super) mod hook {
        include!(concat!(env!("OUT_DIR"), "/hook.skel.rs"));
    }
    pub(in super::super) mod session {
        include!(concat!(env!("OUT_DIR"), "/session.skel.rs"));
    }
}

#[cfg(not(dwell_docs))]
pub(super) use generated::{call, hook, session};

/// Documentation needs the names that signatures have, and no more.
#[cfg(dwell_docs)]
pub(super) mod hook {
    pub(in super::super) struct HookSkelBuilder;
    pub(in super::super) struct HookProgs<'o>(&'o ());
    pub(in super::super) struct OpenHookProgs<'o>(&'o ());
    pub(in super::super) struct OpenHookSkel<'o>(&'o ());
    #[allow(non_camel_case_types, reason = "as it is generated")]
    pub(in super::super) mod types {
        pub(in super::super::super::super) struct hook;
    }
}
