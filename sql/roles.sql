-- Roles with no more rights than each part needs, for PostgreSQL. Idempotent. Run as a superuser in the
-- server's database, before its first start and again after it (rights on tables need the tables):
--
--     psql --dbname sla --file roles.sql
--
-- sla_writer   dbmanager: owns database and tables, migrates, makes and drops partitions     [database] url
-- sla_reader   services, application server: reads, cannot write even by mistake             reader_url
-- sla_policy   policy job and report job: read, insert policies, caps and reports, note runs  policy_url
--
-- Passwords and who may connect from where are yours to set (ALTER ROLE ... PASSWORD, pg_hba.conf).

DO $roles$
DECLARE
    role_name text;
    table_name text;
BEGIN
    FOREACH role_name IN ARRAY ARRAY['sla_writer', 'sla_reader', 'sla_policy'] LOOP
        IF to_regrole(role_name) IS NULL THEN
            EXECUTE format('CREATE ROLE %I LOGIN', role_name);
        END IF;
        EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), role_name);
    END LOOP;
    EXECUTE format('ALTER DATABASE %I OWNER TO sla_writer', current_database());
    -- Nor does any other role of this PostgreSQL connect; one of yours (monitoring) needs GRANT CONNECT ON DATABASE.
    EXECUTE format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database());
    -- Tables that another role made, when the server ran with one role only.
    FOR table_name IN
        SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tableowner <> 'sla_writer'
    LOOP
        EXECUTE format('ALTER TABLE public.%I OWNER TO sla_writer', table_name);
    END LOOP;
    IF to_regclass('public.policies') IS NOT NULL THEN
        GRANT INSERT ON public.policies, public.policy_caps TO sla_policy;
    END IF;
    IF to_regclass('public.jobs') IS NOT NULL THEN
        GRANT INSERT, UPDATE ON public.jobs TO sla_policy;
    END IF;
    IF to_regclass('public.job_results') IS NOT NULL THEN
        GRANT INSERT, DELETE ON public.job_results TO sla_policy;
    END IF;
    IF to_regclass('public.reports') IS NOT NULL THEN
        GRANT INSERT ON public.reports TO sla_policy;
    END IF;
END
$roles$;

REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT USAGE, CREATE ON SCHEMA public TO sla_writer;
GRANT USAGE ON SCHEMA public TO sla_reader, sla_policy;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO sla_reader, sla_policy;
-- Hashes of passwords and tokens are the application server's business.
DO $secrets$
BEGIN
    IF to_regclass('public.accounts') IS NOT NULL THEN
        REVOKE ALL ON public.accounts, public.api_tokens, public.sessions FROM sla_policy;
    END IF;
END
$secrets$;
-- Partitions and tables that come later.
ALTER DEFAULT PRIVILEGES FOR ROLE sla_writer IN SCHEMA public GRANT SELECT ON TABLES TO sla_reader, sla_policy;
ALTER ROLE sla_reader SET default_transaction_read_only = on;
