//! A name as the user wrote it, and what there is to say of one that leads nowhere.

use std::cmp::Reverse;

use super::VMLINUX;
use super::installed::{Installed, Place};
use crate::error::{Error, ErrorKind, NotTraceable};

/// How many near names an error offers.
const NEAR_NAMES: usize = 3;
/// From this similarity on (0 to 1) a name counts as near.
const NEAR: f64 = 0.85;

/// A name as the user wrote it: `FUNCTION` or `MODULE:FUNCTION`.
pub(super) struct Wanted<'a> {
    pub(super) name: &'a str,
    pub(super) module: Option<String>,
    pub(super) function: &'a str,
}

impl<'a> Wanted<'a> {
    pub(super) fn parse(name: &'a str) -> Self {
        match name.split_once(':') {
            // A module is often named as its file is, where dashes stand for underscores.
            Some((module, function)) => Self { name, module: Some(module.replace('-', "_")), function },
            None => Self { name, module: None, function: name },
        }
    }

    pub(super) fn may_be_in(&self, module: &str) -> bool {
        self.module.as_deref().is_none_or(|wanted| wanted == module)
    }

    pub(super) fn reject<T>(&self, reason: NotTraceable) -> Result<T, Error> {
        Err(Error::not_traceable(self.name, reason))
    }
}

/// What there is to say of the module that a function is in, or may be in, if that isn't loaded.
pub(super) fn not_loaded(wanted: &Wanted<'_>, installed: &Installed, is_loaded: fn(&str) -> bool) -> Option<Error> {
    let not_traceable = |reason| Some(Error::not_traceable(wanted.name, reason));
    let Some(module) = wanted.module.clone() else {
        let module = installed.exporter(wanted.function).filter(|module| !is_loaded(module))?.to_owned();
        return not_traceable(NotTraceable::ModuleNotLoaded { module });
    };
    if module == VMLINUX || is_loaded(&module) {
        return None;
    }
    match installed.find(&module) {
        Place::BuiltIn => not_traceable(NotTraceable::ModuleBuiltIn { module }),
        Place::File | Place::Unknown => not_traceable(NotTraceable::ModuleNotLoaded { module }),
        Place::Nowhere => {
            let near = near(&module, installed.names());
            Some(ErrorKind::UnknownModule { function: wanted.name.to_owned(), module, near }.into())
        }
    }
}

/// The names most like this one.
pub(crate) fn near<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut near: Vec<(f64, &str)> = Vec::new();
    for candidate in candidates {
        let similarity = strsim::jaro_winkler(name, candidate);
        if similarity >= NEAR && !near.iter().any(|(_, known)| *known == candidate) {
            near.push((similarity, candidate));
        }
    }
    near.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| Reverse(b.1).cmp(&Reverse(a.1))));
    near.into_iter().take(NEAR_NAMES).map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The module is optional, and may be written as its file is named.
    #[test]
    fn parses_names() {
        let parsed = |name| {
            let Wanted { module, function, .. } = Wanted::parse(name);
            (module, function.to_owned())
        };
        assert_eq!(parsed("ip_rcv"), (None, "ip_rcv".to_owned()));
        assert_eq!(parsed("nf-nat:help"), (Some("nf_nat".to_owned()), "help".to_owned()));
        assert!(Wanted::parse("ip_rcv").may_be_in(VMLINUX) && Wanted::parse("m:f").may_be_in("m"));
        assert!(!Wanted::parse("m:f").may_be_in(VMLINUX) && !Wanted::parse("vmlinux:f").may_be_in("m"));
    }

    /// The nearest come first, each once, and not too many.
    #[test]
    fn offers_near_names() {
        let names = ["ip_rcv_core", "ipv6_rcv", "tcp_sendmsg", "ip_rcv", "ip_rcv", "ip_recv_error"];
        assert_eq!(near("ip_rvc", names.into_iter())[..2], ["ip_rcv", "ipv6_rcv"]);
        assert_eq!(near("ip_rvc", names.into_iter()).len(), 3);
        assert!(near("zzz", names.into_iter()).is_empty());
    }

    /// Modules that aren't loaded, that are part of the kernel, and that there aren't.
    #[test]
    fn explains_modules() {
        let installed = Installed::canned();
        let explained = |name, is_loaded| not_loaded(&Wanted::parse(name), &installed, is_loaded);
        let error = |name| explained(name, |_| false).expect(name).kind().clone();
        let refused = |name: &str, reason| ErrorKind::NotTraceable { function: name.to_owned(), reason };
        let module = || "nf_tables".to_owned();
        for name in ["nft_do_chain", "nf_tables:nft_do_chain", "nf-tables:whatever"] {
            assert_eq!(error(name), refused(name, NotTraceable::ModuleNotLoaded { module: module() }));
            assert!(explained(name, |_| true).is_none(), "{name}");
        }
        let builtin = "sch_fq_codel:fq_codel_enqueue";
        let module_is_builtin = NotTraceable::ModuleBuiltIn { module: "sch_fq_codel".to_owned() };
        assert_eq!(error(builtin), refused(builtin, module_is_builtin));
        let near = vec![module()];
        let unknown = ErrorKind::UnknownModule { function: "nf_table:f".into(), module: "nf_table".into(), near };
        assert_eq!(error("nf_table:f"), unknown);
        for name in ["no_such_function", "vmlinux:nft_do_chain"] {
            assert!(explained(name, |_| false).is_none(), "{name}");
        }
    }
}
