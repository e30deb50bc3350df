//! Looking functions and tracepoints up by name.

use std::cell::OnceCell;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use super::btf::BtfError;
use super::explain::{Wanted, near, not_loaded};
use super::host::FunctionTracer;
use super::index::Index;
use super::installed::{self, Installed};
use super::signature::{Return, Signature};
use super::symbols::{Code, Symbols};
use super::{BTF_DIR, VMLINUX, core_types, host, refused};
use crate::error::{Error, ErrorKind, NotTraceable};

/// Words that a context can hold: MAX_BPF_FUNC_ARGS in the kernel's `include/linux/bpf.h`.
const MOST_WORDS: u32 = 12;

/// What this kernel and its loaded modules have, as it is while this is in use. Modules are read once one is asked for.
pub(crate) struct Kernel {
    vmlinux: Index,
    modules: OnceCell<Vec<Module>>,
    symbols: Symbols,
}

/// A module that offers its BTF.
struct Module {
    name: String,
    /// `None`: it can't be read, since the module is just going.
    index: OnceCell<Option<Index>>,
}

/// A function that programs can be attached to, as far as can be told before it is tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    /// Without the module's name.
    pub(crate) name: String,
    /// `None`: in the kernel itself.
    pub(crate) module: Option<String>,
    pub(crate) signature: Signature,
}

/// `FUNCTION`, or `MODULE:FUNCTION`, as libbpf takes it, too.
impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.module {
            Some(module) => write!(f, "{module}:{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// A raw tracepoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tracepoint {
    pub(crate) name: String,
    /// `None`: in the kernel itself.
    pub(crate) module: Option<String>,
    /// What it hands over, and returns nothing.
    pub(crate) signature: Signature,
}

impl Kernel {
    /// Reads vmlinux's type information.
    pub(crate) fn open() -> Result<Self, Error> {
        let path = format!("{BTF_DIR}/{VMLINUX}");
        let none = || ErrorKind::NoBtf { path: path.clone() };
        let data = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => none().into(),
            _ => Error::system(format!("reading {path}"), error.raw_os_error().unwrap_or(0)),
        })?;
        // Containers put /dev/null in the place of what they hide.
        if data.is_empty() {
            return Err(none().into());
        }
        let bad = |error: BtfError| ErrorKind::BadBtf { path: path.clone(), reason: error.to_string() };
        let vmlinux = Index::parse(data, None).map_err(bad)?;
        Ok(Self { vmlinux, modules: OnceCell::new(), symbols: Symbols::default() })
    }

    /// Finds a function that can be traced, as far as its name, its signature and the kernel's symbols tell.
    ///
    /// `name` is `FUNCTION` or `MODULE:FUNCTION`. The kernel's own functions come before those of modules.
    pub(crate) fn function(&self, name: &str) -> Result<Function, Error> {
        let wanted = Wanted::parse(name);
        if let Some(reason) = refused::by_name(wanted.function) {
            return wanted.reject(reason);
        }
        let mut found = Vec::new();
        if wanted.may_be_in(VMLINUX) {
            found.extend(self.vmlinux.functions(wanted.function).into_iter().map(|signature| (None, signature)));
        }
        if found.is_empty() {
            for (module, index) in self.modules_that(|module| wanted.may_be_in(module)) {
                let signatures = index.functions(wanted.function).into_iter();
                found.extend(signatures.map(|signature| (Some(module.to_owned()), signature)));
            }
        }
        if found.is_empty() {
            return Err(self.not_found(&wanted));
        }
        let described = found.len();
        // Where files declare a function with other names for its parameters, older kernels describe it more than once.
        found.dedup_by(|(module, signature), (first, like)| module == first && signature.is_like(like));
        let (module, signature) = the_one(&wanted, found)?;
        check_signature(&wanted, &signature)?;
        let function = Function { name: wanted.function.to_owned(), module, signature };
        self.check_code(&wanted, &function, described)?;
        // The kernel would attach, and call nothing.
        if host::function_tracer() == FunctionTracer::Off {
            return wanted.reject(NotTraceable::TracerOff);
        }
        Ok(function)
    }

    /// Whether the kernel itself, without its modules, has a function of this name; it may be one that can't be traced.
    pub(crate) fn knows_in_kernel(&self, function: &str) -> bool {
        !self.vmlinux.functions(function).is_empty()
    }

    /// Finds a raw tracepoint, which has a name and no group.
    pub(crate) fn tracepoint(&self, name: &str) -> Result<Tracepoint, Error> {
        let found = |module, signature| Tracepoint { name: name.to_owned(), module, signature };
        if let Some(signature) = self.vmlinux.tracepoint(name) {
            return Ok(found(None, signature));
        }
        let mut modules = self.modules_that(|_| true);
        if let Some((module, signature)) = modules.find_map(|(module, index)| Some((module, index.tracepoint(name)?))) {
            return Ok(found(Some(module.to_owned()), signature));
        }
        // Elsewhere tracepoints are written as GROUP:NAME.
        let bare = name.rsplit(':').next().unwrap_or(name);
        let near = near(bare, self.indexes().flat_map(Index::tracepoint_names));
        Err(ErrorKind::UnknownTracepoint { tracepoint: name.to_owned(), near }.into())
    }

    /// The values of an enum of the kernel, of which those of more than 32 bits lose the upper ones; none if there is no
    /// such enum.
    pub(crate) fn enumerators(&self, name: &str) -> Vec<(u32, String)> {
        self.vmlinux.enumerators(name)
    }

    /// Where a struct of the kernel has a member, in bytes.
    pub(crate) fn member_offset(&self, name: &str, member: &str) -> Option<u32> {
        self.vmlinux.member_offset(name, member)
    }

    /// BTF of nothing but the types that the programs read, where it can be made.
    pub(crate) fn core_types(&self) -> Option<Vec<u8>> {
        core_types::reduced(self.vmlinux.btf())
    }

    fn modules_that(&self, wanted: impl Fn(&str) -> bool) -> impl Iterator<Item = (&str, &Index)> {
        let modules = self.modules.get_or_init(module_names).iter().filter(move |module| wanted(&module.name));
        modules.filter_map(|module| Some((module.name.as_str(), self.index_of(module)?)))
    }

    fn index_of<'a>(&self, module: &'a Module) -> Option<&'a Index> {
        let read = || {
            let data = fs::read(Path::new(BTF_DIR).join(&module.name)).ok()?;
            Index::parse(data, Some(&self.vmlinux)).ok()
        };
        module.index.get_or_init(read).as_ref()
    }

    fn indexes(&self) -> impl Iterator<Item = &Index> {
        [&self.vmlinux].into_iter().chain(self.modules_that(|_| true).map(|(_, index)| index))
    }

    /// Refuses a function that has no code, and one that the kernel would confuse with another of the same name. Where
    /// the symbols can't be read, `described` tells how many there are.
    ///
    /// It finds a function's code by its name. For a module's function it has looked in that module only since Linux 6.4;
    /// nothing but its version tells.
    fn check_code(&self, wanted: &Wanted<'_>, function: &Function, described: usize) -> Result<(), Error> {
        let code = match &function.module {
            None => self.symbols.code_in_kernel(&function.name),
            Some(module) => {
                let looks_in_module = host::kernel_version().is_none_or(|version| version >= (6, 4));
                self.symbols.code_in_module(module, &function.name, looks_in_module)
            }
        };
        match code {
            Code::Copies(1) => Ok(()),
            Code::Unknown if described == 1 => Ok(()),
            Code::Unknown => wanted.reject(NotTraceable::Indistinct { copies: described }),
            Code::Copies(copies) => wanted.reject(NotTraceable::Indistinct { copies }),
            Code::Missing(reason) => wanted.reject(reason),
        }
    }

    /// Why a name isn't in any BTF.
    fn not_found(&self, wanted: &Wanted<'_>) -> Error {
        // First what takes the least time to find out.
        if let Some(error) = not_loaded(wanted, &Installed::read(), installed::is_loaded) {
            return error;
        }
        if let Some(reason) = self.symbols.why_not_in_btf(wanted.module.as_deref(), wanted.function) {
            return Error::not_traceable(wanted.name, reason);
        }
        let near = near(wanted.function, self.indexes().flat_map(Index::function_names));
        ErrorKind::UnknownFunction { function: wanted.name.to_owned(), near }.into()
    }
}

/// The modules that offer their BTF.
fn module_names() -> Vec<Module> {
    let entries = fs::read_dir(Path::new(BTF_DIR)).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name != VMLINUX);
    names.map(|name| Module { name, index: OnceCell::new() }).collect()
}

/// The function, if there is but one of the name.
fn the_one(
    wanted: &Wanted<'_>,
    mut found: Vec<(Option<String>, Signature)>,
) -> Result<(Option<String>, Signature), Error> {
    let copies = found.len();
    match found.pop() {
        Some(function) if copies == 1 => Ok(function),
        Some((last, _)) if found.iter().all(|(module, _)| *module == last) => {
            wanted.reject(NotTraceable::Indistinct { copies })
        }
        last => {
            let modules = found.into_iter().chain(last).map(|(module, _)| module);
            let modules = modules.map(|module| module.unwrap_or_else(|| VMLINUX.to_owned())).collect();
            wanted.reject(NotTraceable::Ambiguous { modules })
        }
    }
}

/// Refuses what a signature alone rules out.
fn check_signature(wanted: &Wanted<'_>, signature: &Signature) -> Result<(), Error> {
    if signature.variadic {
        return wanted.reject(NotTraceable::Variadic);
    }
    if signature.ret == Return::Other {
        return wanted.reject(NotTraceable::ReturnsAggregate);
    }
    let words = signature.words();
    if words > MOST_WORDS {
        return wanted.reject(NotTraceable::TooManyArguments { words });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Param;
    use crate::kernel::btf_writer::Writer;
    use crate::kernel::canned::vmlinux;

    fn signature(words: &[u32], ret: Return) -> Signature {
        let param = |&words| Param { name: String::new(), ty: "int".to_owned(), words, points_to: None };
        Signature { params: words.iter().map(param).collect(), ret, ret_points_to: None, variadic: false }
    }

    fn reason<T>(result: Result<T, Error>) -> NotTraceable {
        match result.err().expect("it is refused").kind() {
            ErrorKind::NotTraceable { reason, .. } => reason.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// What a signature alone rules out.
    #[test]
    fn rejects_signatures() {
        let check = |signature| reason(check_signature(&Wanted::parse("f"), &signature));
        let variadic = Signature { variadic: true, ..signature(&[1], Return::Void) };
        assert_eq!(check(variadic), NotTraceable::Variadic);
        assert_eq!(check(signature(&[], Return::Other)), NotTraceable::ReturnsAggregate);
        assert_eq!(check(signature(&[1; 13], Return::Void)), NotTraceable::TooManyArguments { words: 13 });
        assert!(check_signature(&Wanted::parse("f"), &signature(&[1; 12], Return::Void)).is_ok());
    }

    /// Of several functions of a name, where they are decides what would help.
    #[test]
    fn rejects_copies() {
        let found = |modules: &[Option<&str>]| {
            let each = |module: &Option<&str>| (module.map(str::to_owned), signature(&[1], Return::Void));
            the_one(&Wanted::parse("f"), modules.iter().map(each).collect())
        };
        assert_eq!(found(&[Some("m")]).unwrap().0.as_deref(), Some("m"));
        assert_eq!(reason(found(&[None, None])), NotTraceable::Indistinct { copies: 2 });
        let modules = vec!["nft_ct".to_owned(), "nf_nat".to_owned()];
        assert_eq!(reason(found(&[Some("nft_ct"), Some("nf_nat")])), NotTraceable::Ambiguous { modules });
    }

    /// A little kernel with two modules.
    fn kernel(kallsyms: &str) -> Kernel {
        let vmlinux = Index::parse(vmlinux().finish(), None).unwrap();
        let module = |name: &str, functions: &[&str]| {
            let mut w = Writer::on_top_of(vmlinux.btf());
            for function in functions {
                w.func(function, 1, &[("skb", 4)]);
            }
            w.tracepoint(&format!("{name}_event"), &[4]);
            let index = Index::parse(w.finish(), Some(&vmlinux)).unwrap();
            Module { name: name.to_owned(), index: OnceCell::from(Some(index)) }
        };
        let modules = vec![module("nf_nat", &["nf_nat_in", "help"]), module("nft_ct", &["help", "ip_rcv", "part"])];
        Kernel { vmlinux, modules: OnceCell::from(modules), symbols: Symbols::canned(kallsyms) }
    }

    const KALLSYMS: &str = "\
0 T ip_rcv
0 T twice
0 t differs
0 t split
0 t split.cold
0 t specialised.constprop.0
0 t specialised.constprop.0.cold
0 t state_show
0 t state_show
0 t nf_nat_in\t[nf_nat]
0 t help\t[nf_nat]
0 t help\t[nft_ct]
0 t part.part.0\t[nft_ct]
";

    /// Functions are found where they are; a module may be named as its file is.
    #[test]
    fn finds_functions() {
        let kernel = kernel(KALLSYMS);
        for (name, function, module) in [
            ("ip_rcv", "ip_rcv", None),
            ("vmlinux:ip_rcv", "ip_rcv", None),
            ("split", "split", None),
            ("twice", "twice", None),
            ("nf_nat_in", "nf_nat_in", Some("nf_nat")),
            ("nf-nat:help", "help", Some("nf_nat")),
        ] {
            // Before 6.4 the kernel would confuse the modules' copies, and this is as old as the kernel beneath.
            let Ok(found) = kernel.function(name) else {
                assert!(name.ends_with("help") && host::kernel_version() < Some((6, 4)), "{name}");
                continue;
            };
            assert_eq!((found.name.as_str(), found.module.as_deref()), (function, module), "{name}");
        }
        assert_eq!(kernel.tracepoint("kfree_skb").unwrap().module, None);
        assert_eq!(kernel.tracepoint("nft_ct_event").unwrap().module.as_deref(), Some("nft_ct"));
    }

    /// A module whose type information can't be read, as that of one built for another kernel, costs nobody but itself.
    #[test]
    fn a_module_without_types() {
        let mut kernel = kernel(&format!("{KALLSYMS}0 t broken_in\t[broken]\n"));
        let broken = Module { name: "broken".to_owned(), index: OnceCell::from(None) };
        kernel.modules.get_mut().unwrap().insert(0, broken);
        for name in ["ip_rcv", "nf_nat_in", "nf_nat:help"] {
            assert!(kernel.function(name).is_ok() || host::kernel_version() < Some((6, 4)), "{name}");
        }
        let module = "broken".to_owned();
        assert_eq!(reason(kernel.function("broken_in")), NotTraceable::ModuleWithoutBtf { module });
        // To this kernel it isn't loaded.
        assert!(kernel.function("broken:broken_in").is_err());
    }

    /// What the symbols say of a function that is in BTF, before the kernel is asked; nothing, where they are hidden.
    #[test]
    fn explains_missing_code() {
        let kernel = kernel(KALLSYMS);
        let reason = |name| reason(kernel.function(name));
        assert_eq!(reason("merged"), NotTraceable::Inlined);
        let symbols = vec!["specialised.constprop.0".to_owned()];
        assert_eq!(reason("specialised"), NotTraceable::OptimisedVariant { symbols });
        assert_eq!(reason("part"), NotTraceable::OptimisedVariant { symbols: vec!["part.part.0".to_owned()] });
        assert_eq!(reason("nft_ct:ip_rcv"), NotTraceable::Inlined);
        assert_eq!(reason("state_show"), NotTraceable::Indistinct { copies: 2 });
        assert_eq!(reason("differs"), NotTraceable::Indistinct { copies: 2 });
        let modules = vec!["nf_nat".to_owned(), "nft_ct".to_owned()];
        assert_eq!(reason("help"), NotTraceable::Ambiguous { modules });
        assert_eq!(reason("do_exit"), NotTraceable::NeverReturns);
        let masked = self::kernel("");
        assert_eq!(self::reason(masked.function("twice")), NotTraceable::Indistinct { copies: 2 });
        assert!(["merged", "specialised", "state_show", "part"].iter().all(|name| masked.function(name).is_ok()));
    }

    /// On the kernel that runs the test: a function is found, a wrong one is named with what it resembles.
    #[test]
    fn finds_functions_of_this_kernel() {
        let Ok(kernel) = Kernel::open() else {
            eprintln!("this kernel has no BTF: nothing to look up");
            return;
        };
        let ip_rcv = kernel.function("ip_rcv").unwrap();
        assert_eq!((ip_rcv.name.as_str(), ip_rcv.module, ip_rcv.signature.words()), ("ip_rcv", None, 4));
        assert_eq!(ip_rcv.signature.params[0].to_string(), "struct sk_buff *skb");
        assert_eq!(ip_rcv.signature.params[0].points_to.as_deref(), Some("sk_buff"));
        assert_eq!(ip_rcv.signature.ret, Return::Number { bytes: 4, signed: true });
        assert_eq!(kernel.function("vmlinux:udp_sendmsg").unwrap().name, "udp_sendmsg");

        match kernel.function("ip_rvc").unwrap_err().kind() {
            ErrorKind::UnknownFunction { function, near } => {
                assert_eq!(function, "ip_rvc");
                assert!(near.iter().any(|name| name == "ip_rcv"), "{near:?}");
            }
            other => panic!("{other:?}"),
        }
        match kernel.function("no_such_module:ip_rcv").unwrap_err().kind() {
            ErrorKind::UnknownModule { module, .. } => assert_eq!(module, "no_such_module"),
            // Where nothing is known of the modules there are.
            ErrorKind::NotTraceable { reason: NotTraceable::ModuleNotLoaded { .. }, .. } => {}
            other => panic!("{other:?}"),
        }
    }

    /// On the kernel that runs the test: a tracepoint, its arguments, and the values of one of them.
    #[test]
    fn finds_tracepoints_of_this_kernel() {
        let Ok(kernel) = Kernel::open() else {
            eprintln!("this kernel has no BTF: nothing to look up");
            return;
        };
        let queued = kernel.tracepoint("netif_receive_skb").unwrap();
        let params: Vec<_> = queued.signature.params.iter().map(ToString::to_string).collect();
        assert_eq!((queued.module, params), (None, vec!["struct sk_buff *skb".to_owned()]));
        assert_eq!(queued.signature.ret, Return::Void);
        for wrong in ["netif_recieve_skb", "net:netif_receive_skb"] {
            match kernel.tracepoint(wrong).unwrap_err().kind() {
                ErrorKind::UnknownTracepoint { tracepoint, near } => {
                    assert_eq!(tracepoint, wrong);
                    assert!(near.iter().any(|name| name == "netif_receive_skb"), "{near:?}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(kernel.enumerators("pkt_hash_types").contains(&(3, "PKT_HASH_TYPE_L4".to_owned())));
        assert_eq!(kernel.enumerators("no_such_enum"), []);
    }
}
